"""The ways in which published drafts spell the same: keys of config.json, and names of tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from engine.layers.hyper_parameters import short
from engine.loading.weights import CheckpointError

EAGLE_KEYS = frozenset(
    {
        "eagle_aux_hidden_state_layer_ids",
        "eagle_aux_hidden_state_convention",
        "use_aux_hidden_state",
        "num_aux_hidden_states",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "use_aux_norm",
        "norm_output",
        "use_input_layernorm_in_first_layer",
        "use_last_layernorm",
        "use_mtp_layernorm",
        "next_layer_regular",
        "parallel_draft_step",
        "parallel_draft_heads_num_layers",
    }
)
"""Keys that stand in eagle_config or at the top."""

_PARALLEL = ("ptd_token_id", "mask_token_id", "parallel_draft_step")
_ALIASES = {"use_aux_norm": "fc_norm"}
_EAGLE_PREFIXES = ("eagle_", "norm_", "fc_", "use_aux_", "num_aux_", "parallel_draft_")
_OTHERS_OF_THESE_PREFIXES = ("eagle_config", "norm_topk_prob")
_SPECULATORS_LAYER = "transformer_layer_config"


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the keys of eagle_config at the top, each under one name, and those of speculators' format under
    a Llama config's. Raises ValueError for keys that EAGLE's formats do not have and for keys that contradict."""
    layer = config.get(_SPECULATORS_LAYER)
    if layer is not None and not isinstance(layer, dict):
        raise ValueError(f"config.json: {_SPECULATORS_LAYER} must be an object.")
    eagle = config.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise ValueError("config.json: eagle_config must be an object.")
    unknown = sorted(eagle.keys() - EAGLE_KEYS) + sorted(key for key in config if _is_unknown(key))
    if unknown:
        raise ValueError(f"config.json: {unknown[0][:60]} is no key that this engine knows of EAGLE-3.")
    flat = dict(layer or {})
    for source in (config, eagle):
        for key, value in source.items():
            _put(flat, _ALIASES.get(key, key), value, is_layer_default=source is config and key in (layer or {}))
    _refuse_parallel(flat)
    return flat


def _is_unknown(key: str) -> bool:
    return key.startswith(_EAGLE_PREFIXES) and key not in EAGLE_KEYS and key not in _OTHERS_OF_THESE_PREFIXES


def _put(flat: dict[str, Any], key: str, value: Any, is_layer_default: bool) -> None:
    """A null says nothing; the outer object of speculators' format wins over its layer."""
    if value is None:
        return
    held = flat.get(key)
    if held is not None and held != value and not is_layer_default:
        raise ValueError(f"config.json says both {short(held)} and {short(value)} of {key}.")
    flat[key] = value


def _refuse_parallel(flat: dict[str, Any]) -> None:
    for key in _PARALLEL:
        if flat.get(key) not in (None, 0, 1) or (key != "parallel_draft_step" and flat.get(key) is not None):
            raise ValueError(f"config.json: {key} belongs to a draft that guesses in parallel, which is not supported.")


_LEGACY_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def canonical(name: str) -> str:
    """The one name this engine has for a tensor: no `model.` before it, `midlayer.` before the layer's."""
    name = name.removeprefix("model.")
    name = re.sub(r"^layers\.0\.", "midlayer.", name)
    first, dot, rest = name.partition(".")
    return _LEGACY_NORMS.get(first, first) + dot + rest


def names_in_file(names: Iterable[str]) -> dict[str, str]:
    """Canonical name -> the file's. Raises CheckpointError for one tensor under two names, and for parallel drafts."""
    found: dict[str, str] = {}
    for name in names:
        if canonical(name) in found:
            raise CheckpointError(f"tensors {found[canonical(name)]} and {name} are the same part of a draft.")
        found[canonical(name)] = name
    if "mask_hidden" in found:
        raise CheckpointError("tensor mask_hidden belongs to a draft that guesses in parallel, which is not supported.")
    return found
