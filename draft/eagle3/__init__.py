"""EAGLE-3 drafts (Li et al. 2025): one layer that reads the target's features and the embedding of the token after."""
