"""A tokenizer as llguidance wants it."""

from __future__ import annotations

from typing import Any

from engine.tokenizer import Tokenizer

_END = b"<end of grammar>"


class _Wrapper:
    """The attributes that llguidance reads of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self.bos_token_id, self.eos_token_id = tokenizer.bos_id, size
        self.tokens = [*(tokenizer.token_bytes(i) for i in range(size)), _END]
        self.special_token_ids = [*sorted(tokenizer.special_tokens.values()), size]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())


def error_of(matcher: Any) -> str:
    """What is wrong with an LLMatcher, in one line; empty if nothing is."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())


class Vocabulary:
    """Token ids 0..size - 1 of the tokenizer, and one more that no model has, at `end_id`: its bit in a mask says that
    the grammar may end there. Which real tokens end an answer is the request's affair.

    num_words: uint32 words of one of llguidance's masks, bit i of word i // 32 for token i; end_word, end_bit: where
    that one is.
    """

    def __init__(self, tokenizer: Tokenizer):
        import llguidance
        from llguidance import TokenizerWrapper

        self.end_id = tokenizer.vocab_size
        self.num_words = tokenizer.vocab_size // 32 + 1
        self.end_word, self.end_bit = tokenizer.vocab_size // 32, 1 << tokenizer.vocab_size % 32
        self.tokenizer = llguidance.LLTokenizer(
            TokenizerWrapper(_Wrapper(tokenizer)), n_vocab=self.end_id + 1, eos_token=[self.end_id]
        )

    def matcher(self, grammar: str, limits: Any = None) -> Any:
        """An LLMatcher at the start of a grammar; look at its `is_error`, since it never raises."""
        import llguidance

        return llguidance.LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)
