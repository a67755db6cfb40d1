"""From a request to what its answer is bound by: the constraint it asks for, the calls it may make, and from where on.

Where a prompt leaves the answer inside the reasoning, the reasoning is free, and what follows it is bound. Raw prompts
of /v1/completions are bound from the first token. A chat whose tools need no watching (`tool_choice: "auto"`, none of
them strict, several calls at once allowed, no constraint on the answer) is not bound at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from engine.server.errors import bad_request
from engine.server.grammar_desk import GrammarDesk
from engine.server.grammar_text import GrammarError, check, outputs_of, rule_of, schema_with_options
from engine.server.json_schemas import bare, closed
from engine.server.protocol import ChatCompletionRequest, SamplingFields
from engine.server.structured import Constraint, asked_constraint
from engine.server.tool_grammar import BoundFunction, ToolMarkup, tool_grammar
from engine.server.tool_rules import ToolRules
from engine.server.tools import names_of
from engine.structured_outputs import StructuredOutputs, end_of_reasoning
from engine.tokenizer import Tokenizer

ANY_OBJECT = schema_with_options({"type": "object"})
NO_ARGUMENTS = schema_with_options({"type": "object", "properties": {}, "additionalProperties": False})


@dataclass(frozen=True)
class Binding:
    """`outputs` is None for a free answer; `warnings` say what will not be enforced, is_lenient that the constraint's
    schema is not enforced whole."""

    outputs: StructuredOutputs | None = None
    warnings: tuple[str, ...] = ()
    is_lenient: bool = False


Compile = Callable[[StructuredOutputs], None]


async def bind_completion(body: SamplingFields, desk: GrammarDesk) -> Binding:
    """Raises 400 naming the field at fault, 429 if too many wait at the desk."""
    constraint = asked_constraint(body)
    return Binding() if constraint is None else await desk.run(_bind_text, constraint, desk.compile_outputs)


async def bind_chat(
    body: ChatCompletionRequest,
    rules: ToolRules,
    tokenizer: Tokenizer,
    prompt_token_ids: list[int],
    desk: GrammarDesk,
) -> Binding:
    """`prompt_token_ids` tell whether the answer begins inside the reasoning. Raises as `bind_completion` does."""
    constraint = asked_constraint(body)
    is_watched = _watches(body.tools, rules, constraint)
    if constraint is None and not is_watched:
        return Binding()
    begins_after = end_of_reasoning(prompt_token_ids, tokenizer.think_begin_id, tokenizer.think_end_id)
    if not is_watched:
        bound = await desk.run(_bind_text, constraint, desk.compile_outputs)
        return replace(bound, outputs=replace(bound.outputs, begins_after=begins_after))
    markup = ToolMarkup.of(tokenizer)
    if markup is None:
        raise bad_request("This checkpoint has no markup for tool calls, so they cannot be bound.", "tools")
    calls = _Calls(body.tools, rules, markup, desk.compile_outputs)
    bound = await desk.run(calls.bind, constraint)
    if constraint is None and rules.choice == "auto":
        return replace(bound, outputs=replace(bound.outputs, begins_at=markup.openers))
    begins_at = markup.openers if begins_after else ()
    return replace(bound, outputs=replace(bound.outputs, begins_after=begins_after, begins_at=begins_at))


def _watches(tools: list[dict[str, Any]] | None, rules: ToolRules, constraint: Constraint | None) -> bool:
    """Whether the calls of the answer are bound."""
    if not rules.parses_calls:
        return False
    is_restricted = len(rules.names) < len(names_of(tools))
    is_strict = any(tool["function"].get("strict") for tool in tools)
    return rules.choice != "auto" or is_strict or not rules.is_parallel or is_restricted or constraint is not None


def _refuse(field: str, error: GrammarError) -> NoReturn:
    raise bad_request(f"{field} cannot be enforced: {error}.", field) from None


def _bind_text(constraint: Constraint, compile_outputs: Compile) -> Binding:
    """A lenient constraint whose schema cannot be enforced whole is enforced in part."""
    try:
        outputs = outputs_of(constraint)
        check(outputs, compile_outputs)
        return Binding(outputs)
    except GrammarError as error:
        if not constraint.is_lenient:
            _refuse(constraint.field, error)
        reason = error
    outputs = outputs_of(constraint, is_lenient=True)
    try:
        check(outputs, compile_outputs)
    except GrammarError as error:
        _refuse(constraint.field, error)
    return Binding(outputs, (f"{constraint.field} is enforced in part: {reason}.",), is_lenient=True)


@dataclass(frozen=True)
class _Calls:
    """The calls that an answer may make, as a grammar."""

    tools: list[dict[str, Any]]
    rules: ToolRules
    markup: ToolMarkup
    compile_outputs: Compile

    @property
    def is_forced(self) -> bool:
        return self.rules.choice in ("required", "named")

    def bind(self, constraint: Constraint | None) -> Binding:
        """The whole grammar is compiled; only if that fails is each function's schema looked at."""
        answer, warnings = None, ()
        if constraint is not None and not self.is_forced:
            text = _bind_text(constraint, self.compile_outputs)
            warnings = text.warnings
            try:
                answer = rule_of(constraint, text.is_lenient)
            except GrammarError as error:
                _refuse(constraint.field, error)
        functions = self._functions()
        try:
            return Binding(self._compiled(functions, answer), warnings)
        except GrammarError:
            functions, notes = self._loosened(functions)
        try:
            return Binding(self._compiled(functions, answer), (*warnings, *notes))
        except GrammarError as error:
            _refuse("tools", error)

    def _functions(self) -> dict[int, BoundFunction]:
        """Those that may be called, by their place in `tools`."""
        given = enumerate(tool["function"] for tool in self.tools)
        return {i: BoundFunction(f["name"], self._schema(f)) for i, f in given if f["name"] in self.rules.names}

    def _schema(self, function: dict[str, Any]) -> dict[str, Any]:
        """What binds the arguments: the function's own schema if it is strict or must be called, else an object."""
        is_strict, parameters = function.get("strict"), function.get("parameters")
        if not (is_strict or self.is_forced):
            return ANY_OBJECT
        if parameters is None:
            return NO_ARGUMENTS
        schema = bare(parameters) | {"type": "object"}
        return schema_with_options(closed(schema) if is_strict else schema)

    def _compiled(self, functions: dict[int, BoundFunction], answer: str | None) -> StructuredOutputs:
        is_parallel = self.rules.is_parallel and self.rules.choice != "named"
        outputs = StructuredOutputs(grammar=tool_grammar(self.markup, list(functions.values()), is_parallel, answer))
        check(outputs, self.compile_outputs)
        return outputs

    def _loosened(self, functions: dict[int, BoundFunction]) -> tuple[dict[int, BoundFunction], list[str]]:
        """The functions with schemas that can be enforced, and what is not. Raises 400 for a strict one that cannot."""
        possible, notes = {}, []
        for i, function in functions.items():
            field, schema = f"tools[{i}].function.parameters", function.schema
            try:
                check(StructuredOutputs(json=schema), self.compile_outputs)
            except GrammarError as error:
                if self.tools[i]["function"].get("strict"):
                    _refuse(field, error)
                schema = self._lenient(schema)
                extent = "is not enforced" if schema is ANY_OBJECT else "is enforced in part"
                notes.append(f"{field} {extent}: {error}.")
            possible[i] = BoundFunction(function.name, schema)
        return possible, notes

    def _lenient(self, schema: dict[str, Any]) -> dict[str, Any]:
        schema = schema_with_options(schema, is_lenient=True)
        try:
            check(StructuredOutputs(json=schema), self.compile_outputs)
        except GrammarError:
            return ANY_OBJECT
        return schema
