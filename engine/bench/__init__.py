"""Measurements of the engine: `python -m engine.bench SUBCOMMAND`. Every ratio comes from arms of one run."""
