"""What a run of the doctor is asked, checked before anything starts; it travels to the ranks as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import models
from engine.comm.dispatcher import DISPATCHERS, DispatchLimits
from engine.config import FULL_CONFIG, ConfigError, EngineConfig
from engine.doctor.simulate import SlowLink, parse_link
from engine.json_files import read_json

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MOST_ROWS = 8192
MOST_ROWS_ON_CPU = 64


@dataclass(frozen=True)
class Settings:
    """tp ranks in ep expert groups on `device` ("cpu" or "cuda"); rows: sizes to measure; dispatchers:
    those to measure; seconds: of the whole run. draft, max_model_len, kv_cache_dtype: what the model is to fit with."""

    tp: int
    ep: int
    device: str
    model: str = str(FULL_CONFIG)
    rows: tuple[int, ...] = ROWS
    dispatchers: tuple[str, ...] = tuple(DISPATCHERS)
    simulate_link: str | None = None
    seconds: float = 60.0
    draft: str | None = None
    max_model_len: int | None = None
    kv_cache_dtype: str = "auto"

    def engine_config(self) -> EngineConfig:
        """The engine that would serve the model, on GPUs. Raises ConfigError."""
        return EngineConfig(
            self.model,
            tp=self.tp,
            ep=self.ep,
            draft=self.draft,
            device="cuda",
            dtype="bfloat16",
            max_model_len=self.max_model_len,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def model_config(self) -> Any:
        """The model's configuration, read from its directory; no weights. Raises ConfigError."""
        directory = Path(self.model)
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{directory} holds no config.json; give the directory of a checkpoint, weights or not.")
        raw = read_json(directory / "config.json")
        try:
            return models.find(raw).parse_config(raw)
        except ValueError as error:
            raise ConfigError(f"{directory}: {error}") from error

    def link(self) -> SlowLink | None:
        """Raises ConfigError."""
        if self.simulate_link is None:
            return None
        try:
            return parse_link(self.simulate_link)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def limits(self) -> DispatchLimits:
        """What dispatchers are built for: the model's rows in bfloat16, as they are served."""
        c = self.model_config()
        return DispatchLimits(c.n_routed_experts, c.hidden_size, c.num_experts_per_tok, max(self.rows), torch.bfloat16)

    def check(self, available_gpus: int) -> None:
        """Raises ConfigError for what cannot be measured here."""
        if self.tp < 1 or self.ep < 1 or self.tp % self.ep:
            raise ConfigError(f"--ep {self.ep} must divide --tp {self.tp}, both at least 1.")
        if self.device == "cuda" and not available_gpus:
            raise ConfigError("--device cuda was asked for, but this host has no CUDA GPU; use --device cpu.")
        if not self.rows or min(self.rows) < 1 or max(self.rows) > MOST_ROWS:
            raise ConfigError(f"--rows takes whole numbers from 1 to {MOST_ROWS}, for example 1,4,16.")
        unknown = [name for name in self.dispatchers if name not in DISPATCHERS]
        if unknown or not self.dispatchers:
            raise ConfigError(
                f"--dispatchers names {','.join(unknown) or 'none'}; use some of {', '.join(DISPATCHERS)}."
            )
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"--seconds {self.seconds:g} must lie above 0 and at most at 3600.")
        experts = self.model_config().n_routed_experts
        if experts % self.ep:
            raise ConfigError(f"--ep {self.ep} does not divide the model's {experts} experts; use another one.")
        self.link()
        self.engine_config()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**values | {name: tuple(values[name]) for name in ("rows", "dispatchers")})
