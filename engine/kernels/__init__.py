"""Functions on tensors. `reference` holds the plain PyTorch twin of each; nothing here knows a process group."""
