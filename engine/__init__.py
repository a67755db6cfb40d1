"""Turnout: an expert-parallel inference engine for Kimi-K2.5.

The public names load lazily, so that importing a leaf such as `engine.comm` does not pull in the whole engine.
"""

from engine.version import __version__

__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str):
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from engine.sampling_params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from engine.structured_outputs import StructuredOutputs

        return StructuredOutputs
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
