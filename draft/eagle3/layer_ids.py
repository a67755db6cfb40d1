"""Which of the target's states a draft was trained on, from the two ways in which configs number them.

"input": id i is the state that enters layer i (SafeAILab's reference; [2, L // 2, L - 3] by default). "output": id i is
the state that leaves layer i, which enters layer i + 1 (ModelOpt, TensorRT-LLM; [1, L // 2 - 1, L - 4] by default).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from engine.layers.hyper_parameters import count, short

CONVENTIONS = {"input": 0, "output": 1}
DEFAULT_COUNT = 3


@dataclass(frozen=True)
class LayerIds:
    """ids as the config says them, None where it says none; offset is added to what they mean, to try neighbours.

    convention: a key of CONVENTIONS, as the config's `eagle_aux_hidden_state_convention` says outright. Without it a
    first id of 1 means "output", since no draft reads the state that leaves the first layer, unless the last id is the
    number of layers, which nothing but "input" can say.
    """

    ids: tuple[int, ...] | None = None
    convention: str | None = None
    num_states: int = DEFAULT_COUNT
    offset: int = 0

    @classmethod
    def from_dict(cls, flat: dict[str, Any]) -> LayerIds:
        """Raises ValueError naming the key at fault."""
        if flat.get("use_aux_hidden_state") not in (None, True):
            raise ValueError(
                "config.json: use_aux_hidden_state=false is not supported; such a draft reads the target's last normed "
                "state alone."
            )
        convention = flat.get("eagle_aux_hidden_state_convention")
        if convention is not None and convention not in CONVENTIONS:
            raise ValueError(
                f"config.json: eagle_aux_hidden_state_convention must be input or output, not {short(convention)}."
            )
        ids = _ids(flat.get("eagle_aux_hidden_state_layer_ids"))
        wanted = DEFAULT_COUNT if ids is None else len(ids)
        given = wanted if flat.get("num_aux_hidden_states") is None else count(flat, "num_aux_hidden_states")
        if given != wanted:
            raise ValueError(f"config.json: num_aux_hidden_states={given}, but there are {wanted} layer ids.")
        return cls(ids, convention, wanted)

    def moved(self, offset: int) -> LayerIds:
        """Raises ValueError unless `offset` is -1, 0 or 1."""
        if offset not in (-1, 0, 1):
            raise ValueError(f"layer_id_offset must be -1, 0 or 1, not {offset}.")
        return replace(self, offset=offset)

    def before(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a target of `num_layers` that the states enter; num_layers is what leaves the last, before the
        final norm. Raises ValueError where there are no such layers."""
        ids = self.ids if self.ids is not None else (2, num_layers // 2, num_layers - 3)
        layers = tuple(i + CONVENTIONS[self.convention_of(num_layers)] + self.offset for i in ids)
        if self.ids is None and not _grows(ids):
            raise ValueError(
                f"the draft names no layers, and those meant by default, {list(ids)} of {num_layers}, are not "
                "distinct; name them in eagle_aux_hidden_state_layer_ids."
            )
        if layers[0] < 0 or layers[-1] > num_layers:
            raise ValueError(
                f"the draft reads the states before layers {list(layers)}, and the target has {num_layers} layers; it "
                "was made for another target, or its layer ids are wrong."
            )
        return layers

    def convention_of(self, num_layers: int) -> str:
        if self.convention is not None:
            return self.convention
        return "output" if self.ids is not None and self.ids[0] == 1 and self.ids[-1] < num_layers else "input"


def _ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < 2**18 for i in value):
        raise ValueError(
            f"config.json: eagle_aux_hidden_state_layer_ids must be a list of layer numbers, not {short(value)}."
        )
    if not _grows(tuple(value)):
        raise ValueError(
            f"config.json: eagle_aux_hidden_state_layer_ids={short(value)} must grow from each to the next: the "
            "features are joined in the order of the layers."
        )
    return tuple(value)


def _grows(ids: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(ids))
