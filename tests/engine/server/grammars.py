"""What a grammar takes: the ids of a text, control tokens included, held against it."""

from __future__ import annotations

from functools import cache

from engine.grammar import GrammarCompiler
from engine.structured_outputs import StructuredOutputs
from tests.engine.server.harness import emit, tokenizer


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


def takes(outputs: StructuredOutputs, text: str) -> bool:
    """Whether `text` is a whole answer by `outputs`, from where on they bind."""
    matcher, ids = compiler().submit(outputs).result().deep_copy(), emit(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
