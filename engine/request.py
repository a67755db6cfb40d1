"""What a caller asks for and what it gets back: plain data, no tensors, no scheduling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.sampling_params import SamplingParams

QUEUE_TIMEOUT, REQUEST_TIMEOUT = "queue_timeout", "request_timeout"  # stop reasons of finish reason "timeout"


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token at one position; rank 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of the n answers. `finish_reason` is "stop", "length", "abort", "timeout", "error" or None while running;
    `stop_reason` is the stop string or the stop token id that ended it, None for the end-of-sequence token, the
    setting that timed it out, or what was wrong: a structured output that could not go on as its grammar wants."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestMetrics:
    """Times in seconds, counts in tokens. `ttft` runs from arrival to the first token."""

    ttft: float = 0.0
    decode_time: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def finished(self) -> bool:
        return bool(self.outputs) and all(o.finish_reason is not None for o in self.outputs)


@dataclass(frozen=True)
class CompletionDelta:
    """What one step added to one of the n answers; `text` may be empty while characters or stop strings are held.

    `num_cached_tokens` comes with an answer's first tokens, `metrics` with its end."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None


@dataclass(eq=False)
class Request:
    """One sequence in the engine: what n=1 asks for. Identical on all ranks at every step.

    `seed` is set even where the caller gave none, so that every rank draws the same tokens. `num_pending` counts steps
    in flight that sample: each commits one token, which all counts here include, and as many more as guesses of it are
    accepted, which the host learns when it reads the step. `num_pending_guesses` bounds those. `guess_ids` are the
    draft's for the tokens after the last one, as far as the host knows them; `num_guessed` counts those that the device
    has. `block_digests` say what its full blocks hold, `num_named_blocks` counts those that others may find by them,
    `num_cached_tokens` the prompt tokens that it found computed. `arrival` orders requests of one priority.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)
    num_named_blocks: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrival: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_pending: int = 0
    num_pending_guesses: int = 0
    guess_ids: list[int] = field(default_factory=list)
    num_guessed: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def rank_in_line(self) -> tuple[int, int]:
        """The lowest of those that wait comes first; the highest of those that run gives way first."""
        return self.params.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        """Those the host knows, and one for each step in flight that samples."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids) + self.num_pending

    @property
    def last_token_id(self) -> int:
        """The last one the host knows."""
        return self.output_token_ids[-1] if self.output_token_ids else self.prompt_token_ids[-1]

    @property
    def ends_in_flight(self) -> bool:
        """A token not read yet is the last one by count, whatever it is."""
        return self.num_pending > 0 and self.num_output_tokens >= self.max_tokens

    @property
    def longest(self) -> int:
        """Tokens that are ever computed: all but the last one that `max_tokens` allows."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output together."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:stop] + self.output_token_ids[: max(stop - num_prompt, 0)]

    def commit(self, token_ids: list[int]) -> list[int]:
        """Adds a step's tokens up to the one that ends the request, if one does. Returns those added."""
        self.num_pending = max(self.num_pending - 1, 0)
        taken = []
        for token_id in token_ids:
            self._append(token_id)
            taken.append(token_id)
            if self.finished:
                break
        return taken

    def _append(self, token_id: int) -> None:
        """Finishes the request where it ends: stop ids, then length. A grammar that is over ends an answer that is
        shorter than min_tokens too."""
        self.output_token_ids.append(token_id)
        num_output = len(self.output_token_ids)
        may_stop = num_output >= self.params.min_tokens or self.params.structured_outputs is not None
        if token_id in self.stop_token_ids and may_stop:
            self.finish_reason = "stop"
            self.stop_reason = token_id if token_id in self.params.stop_token_ids else None
        elif num_output >= self.max_tokens:
            self.finish_reason = "length"

    def to_dict(self) -> dict[str, Any]:
        """What another rank needs to hold the same request, JSON-ready."""
        return {
            "request_id": self.request_id,
            "prompt_token_ids": self.prompt_token_ids,
            "params": self.params.to_dict(),
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "stop_token_ids": sorted(self.stop_token_ids),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Request:
        fields = dict(data, params=SamplingParams.from_dict(data["params"]))
        return cls(**dict(fields, stop_token_ids=frozenset(data["stop_token_ids"])))


def _logprobs_from_dict(rows: list | None) -> list | None:
    """JSON turned token ids into text and Logprob into plain objects."""
    if rows is None:
        return None
    return [row and {int(token): Logprob(**value) for token, value in row.items()} for row in rows]


def request_output_from_dict(data: dict[str, Any]) -> RequestOutput:
    """Restores `asdict(RequestOutput)` after a way through JSON."""
    outputs = [CompletionOutput(**dict(o, logprobs=_logprobs_from_dict(o["logprobs"]))) for o in data["outputs"]]
    prompt_logprobs = _logprobs_from_dict(data["prompt_logprobs"])
    metrics = RequestMetrics(**data["metrics"])
    return RequestOutput(**dict(data, outputs=outputs, prompt_logprobs=prompt_logprobs, metrics=metrics))


def completion_delta_from_dict(data: dict[str, Any]) -> CompletionDelta:
    """Restores `asdict(CompletionDelta)` after a way through JSON."""
    return CompletionDelta(
        **dict(
            data,
            logprobs=_logprobs_from_dict(data["logprobs"]),
            prompt_logprobs=_logprobs_from_dict(data["prompt_logprobs"]),
            metrics=data["metrics"] and RequestMetrics(**data["metrics"]),
        )
    )
