"""Renders a checkpoint's own chat template in a sandbox and tokenises the result so that callers cannot forge markup.

Knows jinja and control tokens, not the model; how tools are declared is handed in.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta

from engine.chat_messages import ROLES, prepare_messages, prepare_tools
from engine.config import ConfigError
from engine.errors import InvalidRequestError
from engine.json_files import read_json, read_text
from engine.template_sandbox import TemplateEnvironment, TemplateRefusal
from engine.tokenizer import Tokenizer

# What a caller may set, and the name under which the templates of the family read it.
SWITCHES = {"thinking": "thinking", "enable_thinking": "thinking", "preserve_thinking": "preserve_thinking"}
# Keys that templates look up by name; all other keys of a caller's objects are the caller's text.
MESSAGE_KEYS = ("role", "content", "name", "type", "text", "reasoning_content", "tool_calls", "tool_call_id", "id")
TOOL_KEYS = ("function", "arguments", "description", "parameters")
STRUCTURE_KEYS = frozenset(MESSAGE_KEYS + TOOL_KEYS)
# Values that templates compare with literals; none of these words completes a control token.
ENUMERATED_KEYS = frozenset(("role", "type"))
ENUMERATED_VALUES = frozenset((*ROLES, "text", "function"))


class ChatTemplate:
    """One compiled chat template. `render` gives the reference text, `encode` the ids that go to the model."""

    def __init__(self, source: str, declare_tools: Callable[[list[dict]], str | None]):
        """`declare_tools` writes the tools as text for templates that read `tools_ts_str`, or None for JSON.

        Raises jinja2.TemplateSyntaxError.
        """
        self._environment = TemplateEnvironment()
        self._variables = meta.find_undeclared_variables(self._environment.parse(source))
        self._template = self._environment.from_string(self._environment.parse_limited(source))
        self._declare_tools = declare_tools

    @classmethod
    def from_directory(cls, path: str | Path, declare_tools: Callable[[list[dict]], str | None]) -> ChatTemplate | None:
        """Loads chat_template.jinja, or `chat_template` of tokenizer_config.json; None where there is neither."""
        folder = Path(path)
        file = folder / "chat_template.jinja"
        try:
            if file.exists():
                source = read_text(file)
            else:
                file = folder / "tokenizer_config.json"
                source = _configured_template(read_json(file)) if file.exists() else None
            return None if source is None else cls(source, declare_tools)
        except (ValueError, jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ConfigError(f"Cannot use the chat template in {file} ({error}); fix or remove it.") from error

    def check_switches(self, switches: Any) -> dict[str, bool]:
        """The template's switches out of a caller's chat_template_kwargs; null values count as not given.

        Raises InvalidRequestError for anything else than a known switch that this template reads.
        """
        if switches is None:
            return {}
        if not isinstance(switches, dict):
            raise InvalidRequestError("chat_template_kwargs must be an object.", param="chat_template_kwargs")
        checked: dict[str, bool] = {}
        for name, value in switches.items():
            place = f"chat_template_kwargs.{name}"
            target = SWITCHES.get(name)
            if target is None or target not in self._variables:
                known = [s for s, t in SWITCHES.items() if t in self._variables]
                raise InvalidRequestError(
                    f"{place} is not a switch of this model's chat template; it has: {', '.join(known) or 'none'}.",
                    param=place,
                )
            if value is None:
                continue
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{place} must be true or false.", param=place)
            if checked.setdefault(target, value) != value:
                raise InvalidRequestError(f"{place} contradicts another spelling of the same switch.", param=place)
        return checked

    def render(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        *,
        add_generation_prompt: bool = True,
        **switches: Any,
    ) -> str:
        """The prompt as text; raises InvalidRequestError for messages, tools or switches that make no sense."""
        return self._render(self._inputs(messages, tools, add_generation_prompt, switches), PlainMask())

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: list[dict],
        tools: list[dict] | None = None,
        *,
        add_generation_prompt: bool = True,
        check_text: Callable[[str], None] | None = None,
        **switches: Any,
    ) -> list[int]:
        """The prompt as ids: control tokens come from the template's own text alone, never from a caller's.

        Text between two control tokens is encoded in one piece, so the ids are those of the rendered text unless a
        caller spells a control token. `check_text` sees the rendered text before the costly rest and may raise.

        Raises InvalidRequestError as `render` does.
        """
        inputs = self._inputs(messages, tools, add_generation_prompt, switches)
        text = self._render(inputs, PlainMask())
        if check_text is not None:
            check_text(text)
        mask = SentinelMask()
        pieces = mask.split(self._render(inputs, mask))
        if pieces is None or "".join(pieces) != text:
            return tokenizer.encode_with_spans(text, self._spans_of_edited_text(tokenizer, text, inputs))
        return tokenizer.encode_with_spans(text, _owned_spans(tokenizer, pieces))

    def _spans_of_edited_text(self, tokenizer: Tokenizer, text: str, inputs: dict) -> list[tuple[int, int, int]]:
        """Control tokens of a prompt whose template cuts or compares the caller's text, so that sentinels disturb it.

        Such a prompt is taken only if it has the control tokens that it has when every visible character of the
        caller's text is an "x".
        """
        spans = tokenizer.find_special(text)
        expected = tokenizer.find_special(self._render(inputs, BlankMask()))
        if [token_id for _, _, token_id in spans] != [token_id for _, _, token_id in expected]:
            raise InvalidRequestError(
                "A message, tool or name spells a control token, which this model's chat template cannot carry as "
                "plain text; take it out.",
                param="messages",
            )
        return spans

    def _inputs(self, messages: Any, tools: Any, add_generation_prompt: bool, switches: dict) -> dict[str, Any]:
        inputs = {"messages": prepare_messages(messages), "add_generation_prompt": bool(add_generation_prompt)}
        inputs.update(self.check_switches(switches))
        tools = prepare_tools(tools)
        if tools and "tools_ts_str" in self._variables:
            inputs["tools_ts_str"] = self._declare_tools(tools)
            tools = json.loads(json.dumps(tools, sort_keys=True))
        inputs["tools"] = tools or None
        inputs["strftime_now"] = datetime.now().strftime
        return inputs

    def _render(self, inputs: dict[str, Any], mask: PlainMask) -> str:
        hidden = {name: _hide(value, mask) for name, value in inputs.items()}
        try:
            return self._environment.render_limited(self._template, {**hidden, "json_mask": mask})
        except TemplateRefusal as error:
            raise InvalidRequestError(f"The chat template refuses these messages: {error}", param="messages") from error
        except Exception as error:  # a template may fail in any way on input that it was not written for
            raise InvalidRequestError(
                f"The chat template cannot render these messages: {error}", param="messages"
            ) from error


class PlainMask:
    """Leaves the caller's text as it is: gives the reference text."""

    def hide(self, text: str) -> str:
        return text

    def hide_json(self, text: str) -> str:
        """`text` was serialised by the template from values that went through `hide`."""
        return text


class BlankMask(PlainMask):
    """Keeps the spaces of the caller's text and nothing else."""

    def hide(self, text: str) -> str:
        return re.sub(r"\S", "x", text)


class SentinelMask(PlainMask):
    """Wraps the caller's text in two words that nobody can guess; they hold nothing that JSON or HTML would escape."""

    def __init__(self) -> None:
        nonce = secrets.token_hex(16)
        self._begin, self._end = f"begin{nonce}", f"end{nonce}"
        self._sentinel = re.compile(f"{self._begin}|{self._end}")
        self._hidden: set[str] = set()

    def hide(self, text: str) -> str:
        if not text:
            return text
        self._hidden.add(text)
        return f"{self._begin}{text}{self._end}"

    def hide_json(self, text: str) -> str:
        return self.hide(self._sentinel.sub("", text))

    def split(self, text: str) -> list[str] | None:
        """Pieces of `text` that are in turn the template's own and one whole text of the caller's.

        None where the template took a caller's text apart.
        """
        pieces = self._sentinel.split(text)
        marks = self._sentinel.findall(text)
        paired = marks == [self._begin, self._end] * (len(marks) // 2)
        return pieces if paired and self._hidden.issuperset(pieces[1::2]) else None


def _hide(value: Any, mask: PlainMask) -> Any:
    """A copy of `value` with every string of the caller behind `mask`."""
    if isinstance(value, str):
        return mask.hide(value)
    if isinstance(value, list):
        return [_hide(item, mask) for item in value]
    if isinstance(value, dict):
        return {
            key if key in STRUCTURE_KEYS else mask.hide(key): item
            if key in ENUMERATED_KEYS and isinstance(item, str) and item in ENUMERATED_VALUES
            else _hide(item, mask)
            for key, item in value.items()
        }
    return value


def _owned_spans(tokenizer: Tokenizer, pieces: list[str]) -> list[tuple[int, int, int]]:
    """Control tokens within the even pieces, the template's own, at their places in the joined text."""
    spans, position = [], 0
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            spans += [(position + a, position + b, token_id) for a, b, token_id in tokenizer.find_special(piece)]
        position += len(piece)
    return spans


def _configured_template(config: Any) -> str | None:
    """`chat_template` of a tokenizer_config: one text, or a list of named ones of which "default" counts."""
    template = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = entries[-1].get("template") if entries else None
    if template is not None and not isinstance(template, str):
        raise ValueError("chat_template must be a text or a list with an entry named default.")
    return template
