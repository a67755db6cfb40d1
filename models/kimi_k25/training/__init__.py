"""Trains the bundled tiny checkpoint: corpus, tokenizer, model, training loop, export and model card."""
