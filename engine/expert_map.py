"""Which physical slot holds which logical expert: ranks hold slots in order, so the map says where each expert lives.

Logical ids are the checkpoint's. The router's rows are stored in the order of slots, so that it answers with physical
ids at no cost in a step; counts are turned back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import ConfigError, EngineConfig
from engine.json_files import parse_json, read_text

_FORM = 'a list of expert ids for all layers, or {"layers": {"1": a list, ...}}'


@dataclass(frozen=True)
class ExpertMap:
    """slots: layer -> the logical expert of each physical slot; in layers that are not named, slot e holds expert e."""

    slots: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: EngineConfig, num_experts: int, moe_layers: range) -> ExpertMap:
        """Raises ConfigError in one sentence where the map does not fit the model."""
        value = config.expert_map
        if value is None:
            return cls()
        if isinstance(value, list):
            value = {"layers": dict.fromkeys(map(str, moe_layers), value)}
        named = value.get("layers") if isinstance(value, dict) and set(value) == {"layers"} else None
        if not isinstance(named, dict):
            raise ConfigError(f"expert_map must be {_FORM}.")
        known = {str(layer): layer for layer in moe_layers}
        for name in named:
            if name not in known:
                raise ConfigError(
                    f"expert_map names layer {str(name)[:40]!r}, but the layers with experts are {_span(moe_layers)}."
                )
        return cls({known[name]: _permutation(slots, num_experts, name) for name, slots in named.items()})

    def of_layer(self, layer: int) -> tuple[int, ...] | None:
        """The logical expert of each slot, None where each holds its own."""
        return self.slots.get(layer)


def read(path: str) -> Any:
    """What the file says, still to be compared with the model. Raises ConfigError naming the file."""
    if not Path(path).is_file():
        raise ConfigError(f"expert_map {path[:200]!r} is no file; give a JSON file with {_FORM}.")
    try:
        value = parse_json(read_text(Path(path)), repeats=False)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"expert_map {path}: no JSON of that form ({error}); give {_FORM}.") from error
    if not isinstance(value, list | dict):
        raise ConfigError(f"expert_map {path} must hold {_FORM}.")
    return value


def _span(layers: range) -> str:
    return f"{layers.start} to {layers.stop - 1}" if layers else "none"


def _permutation(slots: Any, num_experts: int, layer: str) -> tuple[int, ...]:
    if not isinstance(slots, list) or not all(type(expert) is int for expert in slots):
        raise ConfigError(f"expert_map: layer {layer} must be a list of expert ids, one for each slot.")
    if len(slots) != num_experts:
        raise ConfigError(f"expert_map: layer {layer} has {len(slots)} slots, the model {num_experts} experts a layer.")
    for expert in slots:
        if not 0 <= expert < num_experts:
            raise ConfigError(f"expert_map: layer {layer} names expert {expert}, the model has 0 to {num_experts - 1}.")
    if len(set(slots)) != num_experts:
        twice = next(expert for expert in slots if slots.count(expert) > 1)
        raise ConfigError(f"expert_map: layer {layer} names expert {twice} twice; each must hold exactly one slot.")
    return tuple(slots)
