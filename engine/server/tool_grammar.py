"""The grammar of a tool section: which functions may be called, how often, with which arguments.

Kimi's markup is control tokens, and the grammar names them by id. A call is
`call begin, functions.NAME:number, argument begin, JSON, call end`; the number is the model's own count, which the
server does not read. A section's calls stand between its begin and its end; calls without a section, which the parser
takes as well, are bound alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.tokenizer import Tokenizer

MAX_DIGITS = 5


@dataclass(frozen=True)
class ToolMarkup:
    """Token ids."""

    section_begin: int
    section_end: int
    call_begin: int
    argument_begin: int
    call_end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ToolMarkup | None:
        """None if the vocabulary lacks one of them."""
        ids = (
            tokenizer.tool_section_begin_id,
            tokenizer.tool_section_end_id,
            tokenizer.tool_call_begin_id,
            tokenizer.tool_argument_begin_id,
            tokenizer.tool_call_end_id,
        )
        return None if None in ids else cls(*ids)

    @property
    def openers(self) -> tuple[int, int]:
        return self.section_begin, self.call_begin


@dataclass(frozen=True)
class BoundFunction:
    """A function that may be called and the JSON schema of its arguments."""

    name: str
    schema: dict[str, Any]


def tool_grammar(
    markup: ToolMarkup, functions: Sequence[BoundFunction], is_parallel: bool, answer: str | None = None
) -> str:
    """A Lark grammar whose start is calls, or else `answer`, the right side of a rule. Linear in the functions."""
    calls = "call+" if is_parallel else "call"
    headers = " | ".join(f"f{i}" for i in range(len(functions)))
    lines = [
        f"start: section | calls{' | answer' if answer else ''}",
        f"section: <[{markup.section_begin}]> calls <[{markup.section_end}]>",
        f"calls: {calls}",
        f"call: <[{markup.call_begin}]> ({headers}) <[{markup.call_end}]>",
    ]
    for i, function in enumerate(functions):
        name = re.sub(r"([.\-])", r"\\\1", function.name)
        header = rf"/functions\.{name}:[0-9]{{1,{MAX_DIGITS}}}/"
        lines += [f"f{i}: {header} <[{markup.argument_begin}]> a{i}", f"a{i}: %json {json.dumps(function.schema)}"]
    return "\n".join([*lines, *([f"answer: {answer}"] if answer else [])])
