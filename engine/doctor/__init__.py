"""`python -m engine.doctor`: what this machine's links do to the model, and what to do about it."""
