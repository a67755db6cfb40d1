"""All answers of an engine that must match something: their masks, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from engine.errors import InvalidRequestError
from engine.grammar.answer import Answer
from engine.grammar.compiler import GrammarCompiler
from engine.request import Request
from engine.structured_outputs import StructuredOutputs
from engine.tokenizer import Tokenizer


class Grammars:
    """Shape letters: N requests, W rows of each, R rows that are bound, B words a row.

    vocab_size: of the model, whose last tokens the tokenizer may not have; no grammar allows those.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._compiler = GrammarCompiler(tokenizer)
        self._vocab_size = vocab_size
        self._num_words = max(-(-vocab_size // 32), tokenizer.vocab_size // 32 + 1)
        self._answers: WeakKeyDictionary[Request, Answer] = WeakKeyDictionary()

    def check(self, structured: StructuredOutputs) -> None:
        """Compiles it, which takes up to a quarter of a second; later requests of the same find it done.

        Any thread may call it. Raises InvalidRequestError."""
        for token_id in (*structured.begins_after, *structured.begins_at):
            if not (isinstance(token_id, int) and 0 <= token_id < self._vocab_size):
                raise InvalidRequestError(
                    f"structured_outputs begins with token id {token_id!r}, but the vocabulary has {self._vocab_size} "
                    "entries.",
                    "structured_outputs",
                )
        self._compiler.check(structured)

    def expect(self, request: Request) -> None:
        """Compiles on another thread what the request needs, while its prompt is computed."""
        self._compiler.submit(request.params.structured_outputs)

    def masks(
        self, requests: Sequence[Request], guesses: Sequence[Sequence[int]], width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(rows int64 [R] among N x W in request order, masks int32 [R, B]) of requests that are to match something.

        guesses: of each request those that its W rows verify, fewer than W. Bit i of word i // 32: token i is allowed.
        """
        self._compiler.begin_step()
        masks_NWB = np.zeros((len(requests), width, self._num_words), dtype=np.uint32)
        answers, bound = list(map(self._answer, requests)), []
        address, step = masks_NWB.ctypes.data, masks_NWB.strides[0]
        for n, (answer, request, guess_ids) in enumerate(zip(answers, requests, guesses, strict=True)):
            if answer.fill(masks_NWB[n], address + n * step, request.output_token_ids, guess_ids):
                bound.append(n)
        for n, w in zip(*np.nonzero(~masks_NWB.any(axis=2)), strict=True):
            answers[n].settle(masks_NWB[n, w], w == 0)
        rows_NW = np.arange(len(requests) * width).reshape(-1, width)
        if len(bound) < len(requests):
            masks_NWB, rows_NW = masks_NWB[bound], rows_NW[bound]
        return rows_NW.ravel(), masks_NWB.reshape(-1, self._num_words).view(np.int32)

    def start_over(self) -> None:
        """Forgets where answers stand, which an interrupted step may have left half done; their tokens tell it."""
        self._answers.clear()

    def _answer(self, request: Request) -> Answer:
        answer = self._answers.get(request)
        if answer is None:
            answer = self._answers[request] = Answer(request, self._compiler, self._num_words)
        return answer

    def failure(self, request: Request) -> str | None:
        """Why an answer that an end token has ended does not match, if its grammar left nothing else."""
        answer = self._answers.pop(request, None)
        if answer is None:
            return None
        row_1B = np.zeros((1, self._num_words), dtype=np.uint32)
        answer.fill(row_1B, row_1B.ctypes.data, request.output_token_ids[:-1], [])
        if not row_1B.any():
            answer.settle(row_1B[0], is_first=True)
        return answer.failure
