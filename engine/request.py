"""What a caller asks for and what it gets back: plain data, no tensors, no scheduling."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1_000
MAX_LOGPROBS = 20
MAX_SALT_LENGTH = 256
QUEUE_TIMEOUT, REQUEST_TIMEOUT = "queue_timeout", "request_timeout"  # stop reasons of finish reason "timeout"


class InvalidRequestError(ValueError):
    """A request that can never be served; `param` names the field at fault, `code` is OpenAI's error code or None."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class EngineDeadError(RuntimeError):
    """The engine cannot go on; the message is the first reason."""


def _check(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{param} {message}", param=param)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request; names and meanings are vLLM's.

    temperature 0 is greedy. `max_tokens=None` means the rest of the context. `logprobs=k` returns the k most likely
    tokens and the chosen one at every generated position, `prompt_logprobs=k` the same for the prompt. The repetition
    penalty sees prompt and output, the presence and frequency penalties the output alone. Logprobs are those of the
    model before penalties, bias and temperature. Of waiting requests the one with the lowest `priority` comes first,
    and it loses its place last. Only requests of the same `cache_salt` share cached prompts.

    Raises InvalidRequestError naming the field when a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        stop = self.stop
        if isinstance(stop, str):
            stop = [stop]
        _check(stop is None or isinstance(stop, list | tuple), "stop", "must be a string or a list of strings.")
        stop = list(stop or [])
        object.__setattr__(self, "stop", stop)
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        _check(isinstance(ids, list | tuple), "stop_token_ids", "must be a list of token ids.")
        object.__setattr__(self, "stop_token_ids", list(ids))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        _check(_is_int(self.n) and 1 <= self.n <= MAX_N, "n", f"must be an integer from 1 to {MAX_N}.")
        _check(_is_number(self.temperature) and 0 <= self.temperature <= 2, "temperature", "must be between 0 and 2.")
        _check(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1.")
        _check(_is_int(self.top_k) and self.top_k >= 0, "top_k", "must be a positive integer, or 0 or -1 for no limit.")
        _check(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "must be between 0 and 1.")
        _check(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63),
            "seed",
            "must be a 64-bit integer.",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_is_number(value) and -2 <= value <= 2, name, "must be between -2 and 2.")
        _check(
            _is_number(self.repetition_penalty) and 0 < self.repetition_penalty <= 10,
            "repetition_penalty",
            "must be above 0 and at most 10.",
        )
        _check(
            len(stop) <= MAX_STOP_STRINGS and all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in stop),
            "stop",
            f"must be at most {MAX_STOP_STRINGS} non-empty strings of at most {MAX_STOP_LENGTH} characters.",
        )
        _check(
            len(self.stop_token_ids) <= 1024 and all(_is_int(t) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids",
            "must be at most 1024 token ids.",
        )
        _check(_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", "must be 0 or more.")
        _check(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            "must be at least 1.",
        )
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"is {self.min_tokens}, more than max_tokens ({self.max_tokens}).",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(
                value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS),
                name,
                f"must be between 0 and {MAX_LOGPROBS}.",
            )
        _check(_is_int(self.priority) and -(2**31) <= self.priority < 2**31, "priority", "must be a 32-bit integer.")
        salt = self.cache_salt
        _check(
            salt is None or (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_LENGTH),
            "cache_salt",
            f"must be a non-empty string of at most {MAX_SALT_LENGTH} characters.",
        )
        self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        bias = {} if self.logit_bias is None else self.logit_bias
        _check(isinstance(bias, dict), "logit_bias", "must map token ids to numbers from -100 to 100.")
        if not bias:
            object.__setattr__(self, "logit_bias", None)
            return
        ids = all(_is_int(k) or (isinstance(k, str) and k.isascii() and k.isdigit()) for k in bias)
        _check(ids, "logit_bias", "keys must be token ids.")
        parsed = {int(k): v for k, v in bias.items()}
        _check(
            all(k >= 0 and _is_number(v) and -100 <= v <= 100 for k, v in parsed.items()),
            "logit_bias",
            "must map token ids to numbers from -100 to 100.",
        )
        object.__setattr__(self, "logit_bias", {k: float(v) for k, v in parsed.items()})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Logits depend on the tokens before, so the host must have read them."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def shapes_logits(self) -> bool:
        """Logits may be changed before they are drawn from, on the host's word."""
        return bool(self.has_penalties or self.logit_bias or self.min_tokens)

    def check_vocab(self, vocab_size: int) -> None:
        """Raises InvalidRequestError if a token id lies outside the vocabulary."""
        for name in ("logit_bias", "stop_token_ids"):
            bad = [t for t in getattr(self, name) or () if t >= vocab_size]
            _check(not bad, name, f"names token id {bad and bad[0]}, but the vocabulary has {vocab_size} entries.")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form; `from_dict` restores it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SamplingParams:
        return cls(**data)


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token at one position; rank 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of the n answers. `finish_reason` is "stop", "length", "abort", "timeout" or None while running;
    `stop_reason` is the stop string or the stop token id that ended it, None for the end-of-sequence token, or the
    setting that timed it out."""

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
        """Finishes the request where it ends: stop ids, then length."""
        self.output_token_ids.append(token_id)
        num_output = len(self.output_token_ids)
        if token_id in self.stop_token_ids and num_output >= self.params.min_tokens:
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
