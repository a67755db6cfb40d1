"""What a device does with a scheduler's steps: a model that says a token by name and place, guesses of what it will say
that are right or wrong by chance, and caches that remember which tokens, after which others, were written where."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from engine.request import Request
from engine.scheduler import ScheduledRequest, SchedulerOutput

WRONG = 5  # a token that no model says


class Left(NamedTuple):
    """What a step left of a request on the device: its last token, where that is, guesses of those after."""

    position: int
    token: int
    guesses: list[int]


class Rows(NamedTuple):
    """Of one request in a step. root: where its last token that is no guess lies; num_tokens: rows up to there."""

    root: int
    num_tokens: int
    guesses: list[int]
    limit: int


class Told(NamedTuple):
    """Tokens committed, and guesses of those after, for each request that samples."""

    committed: list[list[int]]
    guesses: list[list[int]]


class SimulatedDevice:
    """token_of(name, position): what the model says. end: the token that ends an answer, if one does.

    `replays`: steps of decodes alone run as graphs, which take tokens, places and guesses from what the step before
    left, and verify as many guesses as planned, however few the scheduler counts on. Other steps take the host's word.
    A step writes all its rows before it reads any; what it reads must be what the request's own tokens would have left,
    whoever wrote it: in the target's cache all tokens up to a position, in the draft's, if there is one, the one after
    as well.
    """

    def __init__(
        self,
        block_size: int,
        token_of: Callable[[str, int], int],
        replays: bool = True,
        seed: int = 0,
        end: int = -9,
        has_draft: bool = True,
    ):
        self.block_size, self.token_of, self.replays, self.seed, self.end = block_size, token_of, replays, seed, end
        self.cache: dict[tuple[int, int], tuple] = {}
        self.draft_cache: dict[tuple[int, int], tuple] = {}
        self.host: dict[int, list[tuple]] = {}
        self.left: dict[Request, Left] = {}
        self.num_accepted = 0
        self.has_draft = has_draft

    def run(self, output: SchedulerOutput) -> Told:
        is_graph = self.replays and all(item.samples and item.num_tokens == 1 for item in output.scheduled)
        left, committed = {}, []
        self._copy(output)
        rows = [self._rows(item, output.plan.num_verify if is_graph else None) for item in output.scheduled]
        for item, row in zip(output.scheduled, rows, strict=True):
            self._write(item.request, row)
        for item, row in zip(output.scheduled, rows, strict=True):
            if not self._is_over(item.request, row.root):
                self._read_back(item.request, row.root)
            if item.samples:
                drawn = self._draw(item.request, row)
                position = row.root + len(drawn)
                guesses = self._guess(item.request, position, output.plan.num_propose)
                left[item.request] = Left(position, drawn[-1], guesses)
                committed.append(drawn)
                self.num_accepted += len(drawn) - 1
        self.left = left
        return Told(committed, [row.guesses for row in left.values()])

    def _copy(self, output: SchedulerOutput) -> None:
        """Saves, then restores: no two of them to one place, so that they may be made in any order among themselves."""
        assert len({slot for _, slot in output.saves}) == len(output.saves)
        assert len({block for _, block in output.restores}) == len(output.restores)
        caches, offsets = (self.cache, self.draft_cache), range(self.block_size)
        for block, slot in output.saves:
            self.host[slot] = [tuple(cache[block, offset] for offset in offsets) for cache in caches]
        for slot, block in output.restores:
            for cache, rows in zip(caches, self.host[slot], strict=True):
                cache.update({(block, offset): row for offset, row in enumerate(rows)})

    def _root(self, item: ScheduledRequest) -> int:
        """Where the step's last token that is no guess lies."""
        request = item.request
        if not (request.num_pending and item.samples):
            return item.stop - 1
        position = self.left[request].position
        assert item.num_tokens == 1
        assert item.start <= position <= item.start + request.num_pending_guesses, "the host's start bounds it"
        return position

    def _rows(self, item: ScheduledRequest, num_verify: int | None) -> Rows:
        """num_verify: of a graph, None without one."""
        request, root = item.request, self._root(item)
        assert not request.finished
        pending = bool(request.num_pending and item.samples)
        if num_verify is None:
            assert root == item.stop - 1, "only a graph takes a place from the device"
            assert not (pending and item.num_guesses), "only a graph takes guesses from the device"
        tokens = [self.left[request].token] if pending else request.token_ids(item.start, item.stop)
        guesses = self.left[request].guesses if pending else request.guess_ids
        limit = len(request.block_ids) * self.block_size
        if num_verify is None:
            guesses = guesses[: item.num_guesses]
            assert len(guesses) == item.num_guesses and root + item.num_guesses < limit, "each guess has its row"
        else:
            guesses = guesses[: min(num_verify, max(limit - root - 1, 0))]
        assert root < limit or self._is_over(request, root)
        return Rows(root, len(tokens), guesses, limit)

    def _draw(self, request: Request, rows: Rows) -> list[int]:
        """The tokens that the step commits."""
        drawn = [self.token_of(request.request_id, rows.root + 1 + row) for row in range(len(rows.guesses) + 1)]
        wrong = (i for i, (g, t) in enumerate(zip(rows.guesses, drawn, strict=False)) if g != t)
        return drawn[: next(wrong, len(rows.guesses)) + 1]

    def _write(self, request: Request, rows: Rows) -> None:
        """The draft takes the token drawn at a row for the one after it, and the prompt's where none is drawn."""
        said = self._said(request, rows.root + 2 + len(rows.guesses))
        tokens = said[: rows.root + 1] + rows.guesses
        first = rows.root + 1 - rows.num_tokens
        for position, content in enumerate(_contents(request, tokens)):
            if first <= position < rows.limit:
                self.cache[self._slot(request, position)] = content
                self.draft_cache[self._slot(request, position)] = (content, said[position + 1])

    def _read_back(self, request: Request, root: int) -> None:
        """All that attention would read of the committed tokens."""
        said = self._said(request, root + 2)
        for position, content in enumerate(_contents(request, said[: root + 1])):
            slot = self._slot(request, position)
            assert self.cache[slot] == content, "the target's KV is that of these tokens"
            assert not self.has_draft or self.draft_cache[slot] == (content, said[position + 1]), (
                "and so is the draft's"
            )

    def _said(self, request: Request, count: int) -> list[int]:
        """The first `count` tokens of the prompt and the model."""
        prompt = request.prompt_token_ids
        return prompt[:count] + [self.token_of(request.request_id, p) for p in range(len(prompt), count)]

    def _is_over(self, request: Request, root: int) -> bool:
        """Whether the request has ended by its own tokens up to `root`, though the host may not know yet."""
        num_prompt = len(request.prompt_token_ids)
        said = [self.token_of(request.request_id, p) for p in range(num_prompt, root + 1)]
        return len(said) >= request.max_tokens or self.end in said

    def _guess(self, request: Request, position: int, count: int) -> list[int]:
        """Of the tokens after `position`."""
        rng = random.Random(f"{self.seed} {request.request_id} {position}")
        skill = rng.choice([0.0, 0.5, 0.9, 1.0])
        places = range(position + 1, position + 1 + count)
        return [self.token_of(request.request_id, p) if rng.random() < skill else WRONG for p in places]

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        return request.block_ids[position // self.block_size], position % self.block_size


def _contents(request: Request, tokens: list[int]) -> Iterator[tuple]:
    """What the KV of each token depends on: itself, all those before, and the salt."""
    chain = hash(request.params.cache_salt)
    for token in tokens:
        chain = hash((chain, token))
        yield chain, token
