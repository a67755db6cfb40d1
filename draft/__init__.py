"""The draft models the engine can run: architecture name -> how one is loaded, found lazily."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draft.base import Drafter


@dataclass(frozen=True)
class DraftEntry:
    """What the engine calls for a draft.

    load: directory, TargetShape, parallel, dtype, and by name kernels, backend, the target's embed and lm_head -> the
    Drafter; on the meta device it checks all and reads no weight, with a `dummy_seed` it makes the weights up, with a
    `progress` it counts the bytes that it reads.
    """

    load: Callable[..., Drafter]


def _eagle3() -> DraftEntry:
    from draft.eagle3.weights import load

    return DraftEntry(load)


DRAFTS: dict[str, Callable[[], DraftEntry]] = {
    "LlamaForCausalLMEagle3": _eagle3,
    "Eagle3LlamaForCausalLM": _eagle3,
    "Eagle3DeepseekV2ForCausalLM": _eagle3,
    "Eagle3DeepseekV3ForCausalLM": _eagle3,
    "Eagle3Speculator": _eagle3,
    "Eagle3DraftModel": _eagle3,
    "LlamaForCausalLM": _eagle3,  # the first drafts of the method
}


def find(config: dict[str, Any]) -> DraftEntry:
    """The entry for config.json's architecture. Raises ValueError naming the known ones, and for a plain model's
    config, which says nothing of a draft."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if name not in DRAFTS:
        raise ValueError(
            f"config.json has architectures {str(names)[:60]}; this engine drafts with {', '.join(DRAFTS)}."
        )
    if name == "LlamaForCausalLM" and not config.keys() & {"draft_vocab_size", "eagle_config"}:
        raise ValueError(
            "config.json is that of a LlamaForCausalLM without draft_vocab_size or eagle_config: no draft's."
        )
    return DRAFTS[name]()
