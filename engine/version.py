"""The version of the project, where everything may read it."""

__version__ = "0.1.0"
