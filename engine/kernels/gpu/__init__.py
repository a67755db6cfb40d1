"""Triton kernels, each with its plain PyTorch twin in `engine.kernels.reference`; nothing here knows a layer."""
