"""Reads the hyper-parameters of a config.json strictly: every value is checked, and a message names its key."""

from __future__ import annotations

import json
from typing import Any

from engine.layers.rotary import RopeParameters

# Far above any model, and low enough that no product of three of them overflows.
MAX_SIZE = 2**18
MAX_LENGTH = 2**31
MAX_NUMBER = 10**9
MIN_POSITIVE = 1e-3
_LENGTHS = ("vocab_size", "draft_vocab_size", "max_position_embeddings")


def count(text: dict[str, Any], name: str) -> int:
    value = text.get(name)
    if value is None:
        raise ValueError(f"config.json lacks {name}.")
    most = MAX_LENGTH if name in _LENGTHS else MAX_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"config.json: {name} must be a whole number from 1 to {most}, not {short(value)}.")
    return value


def number(source: dict[str, Any], name: str, default: float, kind: type = float) -> Any:
    value = source.get(name)
    if value is None:
        return kind(default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_NUMBER or kind(value) != value:
        raise ValueError(f"config.json: {name} must be a number from 0 to {MAX_NUMBER}, not {short(value)}.")
    return kind(value)


def positive(source: dict[str, Any], name: str, default: float, kind: type = float) -> Any:
    value = number(source, name, default, kind)
    if value < MIN_POSITIVE:
        raise ValueError(f"config.json: {name} must be at least {MIN_POSITIVE}, not {value!r}.")
    return value


def flag(text: dict[str, Any], name: str, default: bool) -> bool:
    value = text.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.json: {name} must be true or false, not {short(value)}.")
    return default if value is None else value


def short(value: Any) -> str:
    """`value` for a message of one line, whatever its size."""
    text = f"{value:.3g}" if isinstance(value, float) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def rope_parameters(text: dict[str, Any]) -> RopeParameters:
    """Accepts rope_scaling + rope_theta, or rope_parameters; `type` or `rope_type`."""
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ValueError("config.json: rope_scaling must be an object.")
    theta = number(text if scaling.get("rope_theta") is None else scaling, "rope_theta", 10000.0)
    if theta <= 1.0:
        raise ValueError(f"config.json: rope_theta must be above 1, not {theta!r}.")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeParameters(theta)
    if kind != "yarn":
        raise ValueError(f"config.json: rope type {kind!r} is not supported; use yarn or default.")
    return RopeParameters(
        theta=theta,
        factor=positive(scaling, "factor", 1.0),
        original_max_position_embeddings=positive(scaling, "original_max_position_embeddings", 4096, kind=int),
        beta_fast=positive(scaling, "beta_fast", 32.0),
        beta_slow=positive(scaling, "beta_slow", 1.0),
        mscale=number(scaling, "mscale", 1.0),
        mscale_all_dim=number(scaling, "mscale_all_dim", 0.0),
    )
