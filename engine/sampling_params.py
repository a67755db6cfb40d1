"""How a caller wants the tokens of one request chosen."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from engine.errors import InvalidRequestError
from engine.structured_outputs import StructuredOutputs

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1_000
MAX_LOGPROBS = 20
MAX_SALT_LENGTH = 256


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
    `structured_outputs` binds what the answer may be.

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
    structured_outputs: StructuredOutputs | None = None

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
        bound = self.structured_outputs
        _check(
            bound is None or isinstance(bound, StructuredOutputs), "structured_outputs", "must be StructuredOutputs."
        )
        self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        bias = {} if self.logit_bias is None else self.logit_bias
        _check(isinstance(bias, dict), "logit_bias", "must map token ids to numbers from -100 to 100.")
        if not bias:
            object.__setattr__(self, "logit_bias", None)
            return
        ids = all(_is_int(k) or (isinstance(k, str) and len(k) < 20 and k.isascii() and k.isdigit()) for k in bias)
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
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_known_tokens(self) -> bool:
        """Logits depend on the tokens before, so the host must have read them."""
        return self.has_penalties or self.structured_outputs is not None

    @property
    def shapes_logits(self) -> bool:
        """Logits may be changed before they are drawn from, on the host's word; what a grammar forbids not counted."""
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
        bound = data.get("structured_outputs")
        return cls(**data | {"structured_outputs": bound and StructuredOutputs(**bound)})
