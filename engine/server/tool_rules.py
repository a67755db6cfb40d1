"""What a chat request allows its answer to do with tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ToolRules:
    """names: the declared functions. choice: OpenAI's `tool_choice`; `name` is the function of a "named" one.

    is_parallel: more than one call may be made. first_number: what the id of the answer's first call counts on from,
    `functions.NAME:first_number`, so that ids are unique in the conversation.
    """

    names: tuple[str, ...] = ()
    choice: Literal["auto", "none", "required", "named"] = "none"
    name: str | None = None
    is_parallel: bool = True
    first_number: int = 0

    @property
    def parses_calls(self) -> bool:
        """Whether tool markup in the answer is calls; else it is text like any other."""
        return bool(self.names) and self.choice != "none"
