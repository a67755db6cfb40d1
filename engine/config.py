"""The one frozen configuration of an engine. "auto" becomes a value in `resolve`, before anything else reads it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

TINY_CHECKPOINT = Path(__file__).resolve().parent.parent / "models" / "kimi_k25" / "tiny"
FULL_CONFIG = TINY_CHECKPOINT.parent / "full"  # the real model's configuration, without weights
_DRAFTS = TINY_CHECKPOINT.parent.parent.parent / "draft" / "eagle3"
BUNDLED_DRAFTS = {TINY_CHECKPOINT: _DRAFTS / "tiny", FULL_CONFIG: _DRAFTS / "full"}
MAX_DRAFT_TOKENS = 15  # an attention kernel takes 16 rows of a request
DTYPES = ("auto", "float32", "bfloat16")
KV_CACHE_DTYPES = ("auto", "fp8")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
_CHOICES = {"dtype": DTYPES, "device": DEVICES, "load_format": LOAD_FORMATS, "kv_cache_dtype": KV_CACHE_DTYPES}
MAX_COUNT = 2**31 - 1
MAX_STEP_MS = 50.0  # on a GPU, unless the configuration says otherwise


class ConfigError(ValueError):
    """A setting that makes no sense; the message says which one and what would work."""


@dataclass(frozen=True)
class EngineConfig:
    """Every setting of `LLM` and `serve.py`, under the names that users of vLLM know.

    tp is the number of ranks; attention is split over all of them. ep divides tp: ep = tp places whole experts,
    ep = 1 slices every expert over all ranks, and a divisor between forms ep groups of tp / ep slices.
    draft is the directory of an EAGLE-3 draft, "auto" for the bundled one of a bundled model, None for none. A step
    verifies up to num_draft_tokens of its guesses a request; with adaptive_draft_tokens as many as measured to pay.
    max_num_batched_tokens bounds the tokens of one step, max_num_seqs the requests in it. graph_memory_gb is the most
    that CUDA graphs may take of a GPU, in GiB. The KV cache takes what weights, steps and graphs leave, as measured at
    start; a size given for it has to fit beside them.
    enable_prefix_caching lets requests share the KV blocks of equal prompt beginnings. kv_cache_dtype "fp8" stores
    latents in 8 bits; kv_offload_gb keeps so many GiB of cold blocks in the host's memory. max_step_ms bounds a step
    that also prefills while others decode; None: 50 on a GPU, no bound on a CPU; 0: no bound. At most
    max_queued_requests answers wait behind the server; queue_timeout: seconds a request may wait for its first step,
    request_timeout: for its end.
    comm_cache is the directory that keeps what was measured of dispatchers, "off" for none, None for the user's own.
    verify_checksums reads every weight file whole before the start and compares it with its published SHA-256;
    prepared_weights: a directory on local disk for each rank's weights as they lie in its memory; see docs/loading.md.
    self_test multiplies by one INT4 expert after loading and compares with its plain matrices.
    expert_load counts on the device which experts tokens are routed to. expert_map: a JSON file (or what it holds) that
    says which physical slot holds which expert; see engine.expert_map.
    step_timeout: seconds within a step in which no rank gets any further, after which the engine stops and names the
    rank at fault. comm_timeout: the process group's own limit, in seconds, for ranks that wait at the start.
    load_format "dummy" makes seeded weights from config.json alone. With it, tp_share and ep_share (default 1) make
    this one process rank 0 of a world of that size and leave out every sum over ranks: the bytes and products of a
    step are those of a real rank, the answer means nothing.
    """

    model: str = str(TINY_CHECKPOINT)
    tp: int = 1
    ep: int = 1
    tp_share: int | None = None
    ep_share: int | None = None
    draft: str | None = None
    num_draft_tokens: int = 3
    adaptive_draft_tokens: bool = True
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_cache_memory_gb: float | None = None
    graph_memory_gb: float = 1.0
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    kv_offload_gb: float = 0.0
    max_step_ms: float | None = None
    max_queued_requests: int = 1024
    queue_timeout: float | None = None
    request_timeout: float | None = None
    moe_comm: str = "auto"
    comm_cache: str | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    load_format: str = "auto"
    seed: int = 0
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    num_threads: int | None = None
    verify_checksums: bool = False
    prepared_weights: str | None = None
    self_test: bool = True
    expert_load: bool = True
    expert_map: str | list | dict | None = None
    step_timeout: float = 20.0
    comm_timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.model is None:
            object.__setattr__(self, "model", str(TINY_CHECKPOINT))
        for name in ("model", "draft", "comm_cache", "prepared_weights"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        if not isinstance(self.model, str):
            raise ConfigError(f"model must be the path of a checkpoint directory, not {self.model!r}.")
        if not isinstance(self.draft, str | None) or self.draft == "":
            raise ConfigError(f"draft must be the path of a draft's directory, 'auto' or None, not {self.draft!r}.")
        self._check_counts()
        if not _is_int(self.seed):
            raise ConfigError(f"seed must be a whole number, not {self.seed!r}.")
        if self.tp_share is not None and self.ep > 1:
            raise ConfigError(f"ep={self.ep} places experts of real ranks; with tp_share use ep_share={self.ep}.")
        _check_division(self.tp, self.ep, "tp", "ep")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} {getattr(self, name)!r} is not known; use one of {', '.join(known)}.")
        memory = self.kv_cache_memory_gb
        if memory is not None and not (_is_number(memory) and 0 < memory <= MAX_COUNT):
            raise ConfigError(f"kv_cache_memory_gb must be a number above 0 and at most {MAX_COUNT}, not {memory!r}.")
        for name in ("graph_memory_gb", "kv_offload_gb"):
            size = getattr(self, name)
            if not (_is_number(size) and 0 <= size <= MAX_COUNT):
                raise ConfigError(f"{name} must be a number from 0 to {MAX_COUNT}, not {size!r}.")
        if self.comm_cache is not None and not (isinstance(self.comm_cache, str) and self.comm_cache):
            raise ConfigError(f"comm_cache must be the path of a directory or 'off', not {self.comm_cache!r}.")
        for name in ("step_timeout", "comm_timeout", "queue_timeout", "request_timeout"):
            seconds = getattr(self, name)
            if seconds is None and name in ("queue_timeout", "request_timeout"):
                continue
            if not (_is_number(seconds) and 0 < seconds <= MAX_COUNT):
                raise ConfigError(f"{name} must be seconds, above 0 and at most {MAX_COUNT}, not {seconds!r}.")
        bound = self.max_step_ms
        if bound is not None and not (_is_number(bound) and 0 <= bound <= MAX_COUNT):
            raise ConfigError(f"max_step_ms must be milliseconds from 0 (no bound) to {MAX_COUNT}, not {bound!r}.")
        if not isinstance(self.hf_overrides, dict):
            raise ConfigError("hf_overrides must be a JSON object of config keys.")
        for name in ("verify_checksums", "self_test", "expert_load", "adaptive_draft_tokens", "enable_prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}.")
        if self.kv_offload_gb and not self.enable_prefix_caching:
            raise ConfigError("kv_offload_gb keeps cached prompts; turn enable_prefix_caching on or leave it out.")
        if self.verify_checksums and self.load_format == "dummy":
            raise ConfigError("verify_checksums reads weight files, and made-up weights have none; leave it out.")
        self._check_prepared_weights()
        self._check_expert_map()
        self._check_share()

    def _check_prepared_weights(self) -> None:
        directory = self.prepared_weights
        if directory is not None and not (isinstance(directory, str) and directory and "\0" not in directory):
            raise ConfigError(f"prepared_weights must be the path of a directory, not {directory!r}.")
        if directory is not None and self.load_format == "dummy":
            raise ConfigError("prepared_weights keeps a checkpoint's weights, and made-up ones are none; leave it out.")

    def _check_expert_map(self) -> None:
        if isinstance(self.expert_map, os.PathLike):
            object.__setattr__(self, "expert_map", os.fspath(self.expert_map))
        if not isinstance(self.expert_map, str | list | dict | None):
            raise ConfigError("expert_map must be the path of a JSON file, or what such a file holds.")
        if self.expert_map is not None and self.load_format == "dummy":
            raise ConfigError("expert_map places a checkpoint's experts, and made-up weights have none; leave it out.")

    def _check_counts(self) -> None:
        optional = ("max_model_len", "num_threads", "tp_share", "ep_share")
        for name in ("tp", "ep", "max_num_seqs", "max_num_batched_tokens", "max_queued_requests", *optional):
            value = getattr(self, name)
            unset = value is None and name in optional
            if not unset and (not _is_int(value) or not 1 <= value <= MAX_COUNT):
                raise ConfigError(f"{name} must be a whole number from 1 to {MAX_COUNT}, not {value!r}.")

        count = self.num_draft_tokens
        if not _is_int(count) or not 1 <= count <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"num_draft_tokens must be a whole number from 1 to {MAX_DRAFT_TOKENS}, not {count!r}.")

    def _check_share(self) -> None:
        if self.tp_share is None:
            if self.ep_share is not None:
                raise ConfigError(f"ep_share={self.ep_share} needs tp_share, the size of the world it divides.")
            return
        if self.tp > 1:
            raise ConfigError(f"tp_share={self.tp_share} is one rank's share in one process; leave tp={self.tp} out.")
        if self.load_format != "dummy":
            raise ConfigError(
                f"tp_share={self.tp_share} computes no meaningful answer, so it loads no checkpoint; add "
                "load_format='dummy'."
            )
        if self.moe_comm not in ("auto", "reference", "allreduce"):
            raise ConfigError(
                f"moe_comm={self.moe_comm!r} exchanges tokens, which a share does not; leave it out with tp_share."
            )
        _check_division(self.tp_share, self.ep_share or 1, "tp_share", "ep_share")

    def placement(self) -> dict[str, Any]:
        """The world this rank is placed in, as `ParallelState` names it: its own, or the one it holds a share of."""
        if self.tp_share is None:
            return {"tp": self.tp, "ep": self.ep}
        return {"tp": self.tp_share, "ep": self.ep_share or 1, "is_share": True}

    @property
    def longest_step(self) -> float | None:
        """Seconds that a step may take which prefills while others decode, None for no bound; once resolved."""
        milliseconds = self.max_step_ms
        if milliseconds is None:
            milliseconds = MAX_STEP_MS if self.device == "cuda" else 0.0
        return milliseconds / 1e3 or None

    def resolve(self, cuda_devices: int) -> EngineConfig:
        """Replaces every "auto" that depends on the machine alone; `cuda_devices` counts the GPUs of this host."""
        device = self.device
        if device == "auto":
            device = "cuda" if cuda_devices else "cpu"
        if device == "cuda" and not cuda_devices:
            raise ConfigError("device='cuda' was asked for, but this host has no CUDA GPU; use device='cpu'.")
        dtype = self.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device == "cuda" else "float32"
        return replace(self, device=device, dtype=dtype)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        return cls(**json.loads(text))


def _check_division(tp: int, ep: int, tp_name: str, ep_name: str) -> None:
    if tp % ep:
        fit = [d for d in range(1, min(tp, 1024) + 1) if tp % d == 0]
        raise ConfigError(f"{ep_name}={ep} does not divide {tp_name}={tp}; use one of {fit}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
