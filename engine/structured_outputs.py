"""What an answer must be, and from which token on: plain data that every rank compiles alike."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import InvalidRequestError

KINDS = ("json", "json_object", "regex", "choice", "grammar")


def end_of_reasoning(
    prompt_token_ids: Sequence[int], think_begin_id: int | None, think_end_id: int | None
) -> tuple[int, ...]:
    """The token that ends the reasoning in which a prompt leaves its answer; empty where it leaves it in none."""
    opens = None not in (think_begin_id, think_end_id) and tuple(prompt_token_ids[-1:]) == (think_begin_id,)
    return (think_end_id,) if opens else ()


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of the five kinds; names are vLLM's.

    json: a JSON schema, as JSON text or as the value itself. json_object: any JSON object. regex: what the whole text
    must match. choice: one of these texts. grammar: a Lark grammar in llguidance's dialect, in which `<[17]>` is the
    token of id 17.

    begins_after: the answer is free until one of these token ids has come, and bound from the token after it on.
    begins_at: likewise, but the token itself is the first that the grammar reads. Both empty: bound from the start.

    Raises InvalidRequestError naming the field.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    begins_after: tuple[int, ...] = ()
    begins_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        given = [
            kind for kind in KINDS if getattr(self, kind) not in (None, False) or (kind, self.json) == ("json", False)
        ]
        if len(given) != 1:
            wanted = f"give exactly one of {', '.join(KINDS)}"
            raise InvalidRequestError(f"structured_outputs has {given or 'none'}; {wanted}.", "structured_outputs")
        if self.json is not None and not isinstance(self.json, str):
            try:
                object.__setattr__(self, "json", json_text.dumps(self.json))
            except (TypeError, ValueError, RecursionError) as error:
                reason = f"structured_outputs.json is no JSON: {error}."
                raise InvalidRequestError(reason, "structured_outputs") from None
        for name in ("choice", "begins_after", "begins_at"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, list | tuple):
                raise InvalidRequestError(f"structured_outputs.{name} must be a list.", "structured_outputs")
            object.__setattr__(self, name, tuple(value))

    def begun_by(
        self, prompt_token_ids: Sequence[int], think_begin_id: int | None, think_end_id: int | None
    ) -> StructuredOutputs:
        """The same for an answer to this prompt: where the prompt leaves it inside the reasoning, it is bound from the
        reasoning's end on. What says itself where it begins stays as it is."""
        if self.begins_after or self.begins_at:
            return self
        return replace(self, begins_after=end_of_reasoning(prompt_token_ids, think_begin_id, think_end_id))

    @property
    def kind(self) -> str:
        return self._given()[0]

    def _given(self) -> list[str]:
        return [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
