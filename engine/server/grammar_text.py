"""Grammar text: a constraint as the engine takes it, or as a rule of llguidance's Lark dialect.

What works on a whole grammar may take long for a large one and belongs in a thread. llguidance is imported by the first
grammar that needs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from engine.errors import InvalidRequestError
from engine.grammar.compiler import WHITESPACE
from engine.server.structured import Constraint
from engine.structured_outputs import StructuredOutputs

MAX_MESSAGE = 300
# The converter's time grows with the square of the rules, a third of a second for 400, and it holds the interpreter.
MAX_GBNF = 64 * 1024
MAX_GBNF_RULES = 300
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|[?!]?start[ \t]*:(?!:=))", re.MULTILINE)
_QUOTATION = re.compile(r" \d+ \| .*")
# `oneOf` is taken as `anyOf`: that exactly one alternative fits cannot be enforced while text grows.
OPTIONS = {"coerce_one_of": True, "whitespace_pattern": WHITESPACE}


class GrammarError(Exception):
    """A grammar that cannot be compiled; the message says why, in one line."""


def lark_of(text: str) -> str:
    """`text`, a grammar in Lark or GBNF, as Lark. Raises GrammarError."""
    if _LARK.search(text):
        return text
    for what, size, most in (("characters", len(text), MAX_GBNF), ("rules", text.count("::="), MAX_GBNF_RULES)):
        if size > most:
            raise GrammarError(f"it has {size} {what}, more than the {most} allowed in GBNF; Lark may have more")
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter has no class of its own for most of its refusals
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        wanted = "give Lark with a rule start, or GBNF with a rule root"
        raise GrammarError(f"it is neither ({reason[:MAX_MESSAGE]}); {wanted}") from None


def schema_with_options(schema: Any, is_lenient: bool = False) -> Any:
    """The schema with the compiler's options; a schema's own options are dropped. Lenient: keywords that cannot be
    enforced are passed over."""
    if isinstance(schema, dict):
        return schema | {"x-guidance": OPTIONS | ({"lenient": True} if is_lenient else {})}
    return schema


def outputs_of(constraint: Constraint, is_lenient: bool = False) -> StructuredOutputs:
    """Bound from the first token. Raises GrammarError."""
    value = constraint.value
    if constraint.kind == "json":
        value = schema_with_options(value, is_lenient)
    elif constraint.kind == "grammar":
        value = lark_of(value)
    return StructuredOutputs(**{constraint.kind: value})


def rule_of(constraint: Constraint, is_lenient: bool = False) -> str:
    """The right side of a Lark rule for the constraint. Raises GrammarError for a grammar, which is many rules."""
    if constraint.kind == "json":
        return f"%json {json.dumps(schema_with_options(constraint.value, is_lenient))}"
    if constraint.kind == "json_object":
        return f"%json {json.dumps(schema_with_options({'type': 'object'}))}"
    if constraint.kind == "choice":
        return " | ".join(json.dumps(text) for text in constraint.value)
    if constraint.kind == "regex":
        from llguidance import regex_to_lark

        return f"/{regex_to_lark(constraint.value, '')}/"
    raise GrammarError('it cannot be combined with tools that may be called; set tool_choice to "none" or leave it out')


def check(outputs: StructuredOutputs, compile_outputs: Callable[[StructuredOutputs], None]) -> None:
    """Raises GrammarError where `compile_outputs`, the engine's, raises InvalidRequestError."""
    try:
        compile_outputs(outputs)
    except InvalidRequestError as error:
        raise GrammarError(_reason(str(error))) from None


def _reason(message: str) -> str:
    """Without the engine's own name of the field, and without the quotation that points into the grammar."""
    _, _, reason = message.rpartition(" cannot be used: ")
    return _QUOTATION.sub("", " ".join(reason.split()))[:MAX_MESSAGE].rstrip(". ^")
