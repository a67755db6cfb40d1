"""Jinja as transformers sets it up for chat templates, with an end to what a template may cost.

Jinja's sandbox keeps a template from reaching Python; this adds limits on time and size, since a template comes with
the checkpoint and may loop or grow without end, by mistake or not.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0  # of this thread's processor, so that a busy machine changes nothing
MAX_TEXT = 2**27
MAX_NUMBER = 2**20
DEADLINE = "render_deadline"


class TemplateRefusal(jinja2.TemplateError):
    """The template itself called raise_exception."""


class TemplateLimit(jinja2.TemplateError):
    """The template costs more than any prompt is worth."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Counts the time of every loop turn and call, and the size of what operators and calls make."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]

    def parse_limited(self, source: str) -> nodes.Template:
        return _Instrument().visit(self.parse(source))

    def render_limited(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Raises TemplateLimit for a prompt that takes too long or grows too large."""
        pieces, size = [], 0
        for piece in template.generate(**variables, **{DEADLINE: time.thread_time() + MAX_SECONDS}):
            size += len(piece)
            _check_size(size)
            pieces.append(piece)
        return "".join(pieces)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.tick(__context)
        _check_numbers(args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        _check_size(len(result) if isinstance(result, str) else 0)
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, str | list | tuple) else None for side in (left, right)]
        if operator == "+" and None not in sizes:
            _check_size(sum(sizes))
        elif operator != "+":
            _check_numbers((left, right), {})
            _check_size(max(size or 1 for size in sizes) * max(_whole(left), _whole(right), 1))
        return super().call_binop(context, operator, left, right)

    def tick(self, context: Any) -> None:
        if time.thread_time() > context.parent[DEADLINE]:
            raise TemplateLimit(f"it runs longer than {MAX_SECONDS:g} s")

    def concatenate(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


class _Instrument(NodeTransformer):
    """Puts a call of `tick` at the start of every loop turn and macro, and makes `~` a call of `concatenate`."""

    def _visit_body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [nodes.ContextReference()], node.lineno), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _visit_body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", node.nodes, node.lineno)


def _call(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=lineno)


def _bounded(function: Callable) -> Callable:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        return function(*args, **kwargs)

    return checked


def _check_numbers(args: tuple, kwargs: dict[str, Any]) -> None:
    if any(_whole(value) > MAX_NUMBER for value in (*args, *kwargs.values())):
        raise TemplateLimit(f"it computes with a number above {MAX_NUMBER}")


def _whole(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _check_size(size: int) -> None:
    if size > MAX_TEXT:
        raise TemplateLimit(f"it makes a text of more than {MAX_TEXT} characters")


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja's own filter would escape <, >, & and quotes for HTML."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return context["json_mask"].hide_json(text)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)
