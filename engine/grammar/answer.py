"""Where one answer stands in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.errors import InvalidRequestError
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.vocabulary import error_of
from engine.request import Request


class Ends(NamedTuple):
    """Tokens that end an answer, and as masks: `always` those once its grammar has ended, `freely` those where it may
    go on as well; with ignore_eos these are the caller's own stop tokens."""

    token_ids: frozenset[int]
    always: np.ndarray
    freely: np.ndarray

    @classmethod
    def of(cls, request: Request, num_words: int) -> Ends:
        params = request.params
        freely = params.stop_token_ids if params.ignore_eos else request.stop_token_ids
        return cls(request.stop_token_ids, mask_of(request.stop_token_ids, num_words), mask_of(freely, num_words))


class Answer:
    """Follows a request's output tokens. Masks are uint32 rows of num_words words, bit i of word i // 32 for token i.

    It is free until a token has come that the grammar begins after or at; then bound; and failed once the grammar
    refuses a token or allows none, after which only an end is left. It holds no request, so that it goes with it.
    """

    def __init__(self, request: Request, compiler: GrammarCompiler, num_words: int):
        structured = request.params.structured_outputs
        self._structured, self._compiler = structured, compiler
        self._after, self._at = frozenset(structured.begins_after), frozenset(structured.begins_at)
        self._min_tokens, self._ends = request.params.min_tokens, Ends.of(request, num_words)
        self._is_free = bool(self._after or self._at)
        self._num_read = 0
        self._matcher: Any = None
        self._taken: list[int] = []  # by the matcher
        self._may_end = False  # at the last token, by the grammar
        self.failure: str | None = None

    def follow(self, output_ids: Sequence[int]) -> None:
        """Reads those tokens of an answer that are new."""
        for token_id in output_ids[self._num_read :]:
            self._read(token_id)
        self._num_read = len(output_ids)

    def fill(self, rows_WB: np.ndarray, address: int, output_ids: Sequence[int], guess_ids: Sequence[int]) -> bool:
        """Masks for the row of the last token, and for the row behind each guess as if those before were the answer's
        tokens. Rows are zeros before, the first at `address`, one behind the other; those beyond are made like the last
        one. False if no row binds. A row that is left empty is for `settle`.

        Guesses stop at the first that ends the answer or that its row does not allow: no row behind it matters.
        """
        self.follow(output_ids)
        self._may_end = False
        binds, width = self._fill(rows_WB[0], address, len(output_ids)), 1
        if len(rows_WB) == 1:
            return binds
        place = self._is_free, len(self._taken), self.failure, self._may_end
        for guess_id in guess_ids[: len(rows_WB) - 1]:
            if guess_id in self._ends.token_ids or not allows(rows_WB[width - 1], guess_id):
                break
            self._read(guess_id)
            binds |= self._fill(rows_WB[width], address + width * rows_WB.strides[0], len(output_ids) + width)
            width += 1
        rows_WB[width:] = rows_WB[width - 1]
        self._return(*place)
        return binds

    def settle(self, row_B: np.ndarray, is_first: bool) -> None:
        """Nothing but an end is left where a row is empty. is_first: the row is that of the last token."""
        row_B[:] = self._ends.always if self._ends.token_ids else ALL
        if is_first and not self._may_end and self.failure is None:
            self.failure = "it allows no token of this vocabulary"

    def _read(self, token_id: int) -> None:
        if self._is_free:
            self._is_free = token_id not in self._after and token_id not in self._at
            if self._is_free or token_id in self._after:
                return
        if not self._begin():
            return
        if self._take(token_id) or (self._renew() and self._take(token_id)):
            self._taken.append(token_id)
        elif self.failure is None:
            self.failure = error_of(self._matcher) or f"it refuses token {token_id}"

    def _take(self, token_id: int) -> bool:
        return self._matcher.try_consume_tokens([token_id]) == 1

    def _renew(self) -> bool:
        """Puts another matcher in the place of one that met a limit, perhaps by what others have made of the lexer that
        they share; False if it cannot come as far, or if the step has done enough of this."""
        reason = error_of(self._matcher)
        matcher = self._compiler.renew(self._structured, self._taken)
        if matcher is None:
            self.failure = reason or "its grammar met a limit of the compiler"
            return False
        self._matcher = matcher
        return True

    def _begin(self) -> bool:
        """Whether there is a matcher that is of use."""
        if self._matcher is None and self.failure is None:
            try:
                self._matcher = self._compiler.submit(self._structured).result().deep_copy()
            except InvalidRequestError as error:
                self.failure = str(error)
        return self.failure is None

    def _return(self, is_free: bool, num_taken: int, failure: str | None, may_end: bool) -> None:
        """To where the answer stood before its guesses. A matcher that met a limit behind one has no way back."""
        self._may_end = may_end
        more = len(self._taken) - num_taken
        del self._taken[num_taken:]
        self._is_free, self.failure = is_free, failure
        if self._matcher is None or failure is not None:
            return
        if self._matcher.is_error() or (more and not self._matcher.rollback(more)):
            self._renew()

    def _fill(self, row_B: np.ndarray, address: int, num_output: int) -> bool:
        """One row; False if it binds nothing."""
        must_go_on = num_output < self._min_tokens
        if self._is_free:
            # What must match has to begin before it may end; what only may begin need not.
            is_kept = bool(self._after) or must_go_on
            blocked_B = self._ends.always if is_kept else self._ends.always & ~self._ends.freely
            row_B[:] = ~blocked_B
            return bool(blocked_B.any())
        if self._begin():
            self._fill_bound(row_B, address, must_go_on)
        return True

    def _fill_bound(self, row_B: np.ndarray, address: int, must_go_on: bool) -> None:
        vocabulary = self._compiler.vocabulary
        num_bytes = vocabulary.num_words * 4
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        if self._matcher.is_error() and self._renew():
            self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        if self._matcher.is_error():
            self.failure = self.failure or error_of(self._matcher)
            row_B[:] = 0
            return
        word = int(row_B[vocabulary.end_word])
        self._may_end = bool(word & vocabulary.end_bit)
        if self._may_end:
            row_B[vocabulary.end_word] = word & ~vocabulary.end_bit
            if not must_go_on:
                row_B |= self._ends.freely
        if must_go_on and (kept_B := row_B & ~self._ends.always).any():  # the grammar may allow a stop token
            row_B[:] = kept_B


ALL = np.uint32(2**32 - 1)


def mask_of(token_ids: Iterable[int], num_words: int) -> np.ndarray:
    mask = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask


def allows(row_B: np.ndarray, token_id: int) -> bool:
    return bool(int(row_B[token_id // 32]) >> token_id % 32 & 1)
