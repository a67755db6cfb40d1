"""Structured output in the engine: grammars compiled for a tokenizer, and the tokens that each allows next.

Host code: NumPy arrays and llguidance, which is imported when the first grammar is compiled; no torch. Every rank holds
the same, made from the same requests, so that no mask is ever sent from rank to rank.
"""

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.grammars import Grammars

__all__ = ["GrammarCompiler", "Grammars"]
