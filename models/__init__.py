"""The models the engine can run: architecture name -> what the engine needs of it, loaded lazily."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelEntry:
    """What the engine calls for a model.

    parse_config: config.json's dict -> the model's config. load_model: directory, config, parallel, dtype and the
    chosen backends -> the model; on the meta device it checks all and reads no weight, with a `dummy_seed` it makes the
    weights up, with a `checkpoint` it reads no header again, with a `progress` it counts the bytes that it reads,
    with a `preparation` it takes prepared weights from there or leaves them there.
    open_model: the same without reading; `load` of its result reads. share_bytes: the model's config,
    parallel, dtype and how experts are held -> bytes of a rank's weights by kind, what load_model allocates.
    declare_tools: tools -> the text the chat template shows, None for its JSON form.
    """

    parse_config: Callable[[dict[str, Any]], Any]
    load_model: Callable[..., Any]
    open_model: Callable[..., Any]
    share_bytes: Callable[..., dict[str, int]]
    declare_tools: Callable[[list[dict]], str | None]


def _kimi_k25() -> ModelEntry:
    from models.kimi_k25.config import KimiConfig
    from models.kimi_k25.sizes import share_bytes
    from models.kimi_k25.tool_declaration import declare_tools
    from models.kimi_k25.weights import load_model, open_model

    return ModelEntry(KimiConfig.from_dict, load_model, open_model, share_bytes, declare_tools)


MODELS: dict[str, Callable[[], ModelEntry]] = {
    "kimi_k25": _kimi_k25,
    "kimi_k2": _kimi_k25,
    "deepseek_v3": _kimi_k25,
}


def find(config: dict[str, Any]) -> ModelEntry:
    """The entry for config.json's `model_type`. Raises ValueError naming the known ones."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODELS:
        raise ValueError(f"config.json has model_type {model_type!r}; this engine runs {', '.join(MODELS)}.")
    return MODELS[model_type]()
