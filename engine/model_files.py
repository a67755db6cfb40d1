"""The small files of a checkpoint directory: configuration, generation defaults, tokenizer, chat template."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draft
import models
from engine.chat_template import ChatTemplate
from engine.config import BUNDLED_DRAFTS, FULL_CONFIG, TINY_CHECKPOINT, ConfigError, EngineConfig
from engine.errors import InvalidRequestError
from engine.json_files import read_json, token_ids
from engine.log import logger
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True)
class DraftFiles:
    directory: Path
    entry: draft.DraftEntry

    @classmethod
    def read(cls, config: EngineConfig) -> DraftFiles | None:
        """None where no draft was asked for, or "auto" knows none. Raises ConfigError."""
        if config.draft is None:
            return None
        directory = Path(config.draft)
        if config.draft == "auto":
            directory = BUNDLED_DRAFTS.get(Path(config.model).resolve())
            if directory is None:
                logger.info("draft=auto knows no draft for %s: decoding without", config.model)
                return None
        if not os.path.isfile(directory / "config.json"):
            raise ConfigError(
                f"draft {str(directory)[:200]!r} holds no config.json; give an EAGLE-3 draft's directory, or leave "
                "draft out."
            )
        try:
            return cls(directory, draft.find(read_json(directory / "config.json")))
        except ValueError as error:
            raise ConfigError(f"draft {directory}: {error}") from error


@dataclass(frozen=True)
class ModelFiles:
    """Everything that is known, and can be found wrong, before any weight is read."""

    directory: Path
    entry: models.ModelEntry
    model_config: Any
    generation_config: dict[str, Any]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    draft: DraftFiles | None = None

    @classmethod
    def read(cls, config: EngineConfig) -> ModelFiles:
        """Raises ConfigError in one sentence for a path that is no checkpoint of a known model."""
        directory, entry, model_config = read_model_config(config)
        return cls(
            directory,
            entry,
            model_config,
            _generation_config(directory / "generation_config.json", model_config.vocab_size),
            _tokenizer(directory, model_config.vocab_size, config.load_format == "dummy"),
            _chat_template(directory, entry, config.load_format == "dummy"),
            DraftFiles.read(config),
        )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a sequence: both config files and the tokenizer may name some, and each counts."""
        listed = token_ids(self.generation_config.get("eos_token_id"), "eos_token_id", self.model_config.vocab_size)
        ends = (self.tokenizer.eos_id, self.tokenizer.im_end_id, self.tokenizer.eot_id)
        return frozenset(i for i in (*listed, *self.model_config.eos_token_ids, *ends) if i is not None)


def read_model_config(config: EngineConfig) -> tuple[Path, models.ModelEntry, Any]:
    """The checkpoint's directory, the model that its config.json names, and that model's own configuration.

    Raises ConfigError in one sentence."""
    directory = Path(config.model)
    if not os.path.exists(directory):  # Path.exists raises for a name that is too long
        raise ConfigError(
            f"model {config.model[:200]!r} does not exist; give the path of a Hugging Face checkpoint directory."
        )
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} holds no config.json; give the path of a Hugging Face checkpoint directory.")
    raw = _override(read_json(directory / "config.json"), config.hf_overrides)
    try:
        entry = models.find(raw)
        return directory, entry, entry.parse_config(raw)
    except ValueError as error:
        raise ConfigError(f"{directory}: {error}") from error


def _generation_config(path: Path, vocab_size: int) -> dict[str, Any]:
    """Checked here, since a value out of range would otherwise fail every request that leaves it to the checkpoint."""
    values = read_json(path) if path.exists() else {}
    defaults = {name: values[name] for name in SAMPLING_DEFAULTS if values.get(name) is not None}
    try:
        token_ids(values.get("eos_token_id"), "eos_token_id", vocab_size)
        SamplingParams(**defaults)
    except (InvalidRequestError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return values


def _tokenizer(directory: Path, vocab_size: int, is_dummy: bool) -> Tokenizer:
    """The directory's own; one of made-up tokens beside made-up weights, where there is none."""
    if is_dummy and not (directory / "tiktoken.model").exists():
        return Tokenizer.synthetic(vocab_size)
    if directory.resolve() == FULL_CONFIG:
        raise ConfigError(f"{directory} is a configuration without weights; add --load-format dummy.")
    tokenizer = Tokenizer.from_directory(directory)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} entries, more than the model's vocab_size of "
            f"{vocab_size}."
        )
    return tokenizer


def _chat_template(directory: Path, entry: models.ModelEntry, is_dummy: bool) -> ChatTemplate | None:
    """The directory's own; beside made-up weights the bundled checkpoint's, where there is none."""
    template = ChatTemplate.from_directory(directory, entry.declare_tools)
    if template is None and is_dummy:
        return ChatTemplate.from_directory(TINY_CHECKPOINT, entry.declare_tools)
    return template


def _override(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """config.json with some keys replaced; they reach the text model's part where there is one."""
    raw = raw | overrides
    if isinstance(raw.get("text_config"), dict):
        raw["text_config"] = raw["text_config"] | overrides
    return raw
