"""Kimi-K2, K2.5, K2.6 and the DeepSeek-V3 text models that share their architecture."""
