"""The requests we take, as OpenAI and vLLM name them. Types are strict: "5" is no number and true is no 1.

null means absent everywhere. Ranges are checked once, in `SamplingParams` and where messages are rendered; here they
stand in the schema alone, for the OpenAPI page (the lengths of long lists are in `GET /server_info`). Fields that no
model here names stay in `model_extra`, where `fields.py` refuses or reports them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from engine.sampling_params import MAX_LOGPROBS, MAX_N, MAX_SALT_LENGTH, MAX_STOP_STRINGS

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
FORMATS = ("text", "json_object", "json_schema")
REQUEST_ID = r"[A-Za-z0-9_.:\-]{1,128}"
TEXT = {"type": "string", "minLength": 1}
TEXT_OR_EMPTY = {"type": "string"}
INTEGER_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
STRING_LIST = {"type": "array", "items": TEXT, "minItems": 1}
STOP_LIST = {"type": "array", "items": TEXT, "maxItems": MAX_STOP_STRINGS}
TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
CONTENT = ({"type": "string"}, {"type": "array", "items": TEXT_PART})
NULL = {"type": "null"}
TOOL_CALL = {
    "type": "object",
    "properties": {
        "id": TEXT_OR_EMPTY,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": TEXT_OR_EMPTY, "arguments": {"type": ["string", "object", "null"]}},
            "required": ["name"],
        },
    },
    "required": ["id", "function"],
}


def _message(roles: tuple[str, ...], content: tuple[dict, ...], required: tuple[str, ...], **more: Any) -> dict:
    properties = {"role": {"enum": list(roles)}, "content": {"anyOf": list(content)}} | more
    return {"type": "object", "properties": properties, "required": ["role", *required]}


MESSAGE = {
    "anyOf": [
        _message(("system", "developer", "user"), CONTENT, ("content",)),
        _message(
            ("assistant",),
            (*CONTENT, NULL),
            (),
            reasoning_content={"type": ["string", "null"]},
            tool_calls={"anyOf": [{"type": "array", "items": TOOL_CALL}, NULL]},
        ),
        _message(("tool",), (*CONTENT, NULL), ("tool_call_id",), tool_call_id={"type": "string"}),
    ]
}
TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,64}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}


def either(first: str, first_schema: dict, second: str, second_schema: dict) -> dict[str, Any]:
    """The schema of an object that has one of two fields, and null or false in place of the other."""
    left_out = {"enum": [None, False]}
    return {
        "anyOf": [
            {"required": [first], "properties": {first: first_schema, second: left_out}},
            {"required": [second], "properties": {first: left_out, second: second_schema}},
        ]
    }


def documented(**schema: Any) -> Any:
    """An optional field whose limits the schema names."""
    return Field(None, json_schema_extra=schema)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _check_stop(value: Any) -> Any:
    if value is None or isinstance(value, str) or _is_strings(value):
        return value
    raise ValueError("must be a string or a list of strings")


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str) or _is_ids(value) or _is_strings(value):
        return value
    if isinstance(value, list) and all(_is_ids(item) for item in value):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")


Stop = Annotated[Any, PlainValidator(_check_stop), WithJsonSchema({"anyOf": [TEXT, STOP_LIST, {"type": "null"}]})]
Prompt = Annotated[
    Any,
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {"anyOf": [TEXT, STRING_LIST, INTEGER_LIST, {"type": "array", "items": INTEGER_LIST, "minItems": 1}]}
    ),
]


def _to_first_wrong(kind: type) -> BeforeValidator:
    """Cuts a list behind its first entry of another type: pydantic would make an error of every wrong one, at a cost of
    seconds for a long list, and hold the interpreter meanwhile."""

    def cut(value: Any) -> Any:
        if not isinstance(value, list) or set(map(type, value)) <= {kind}:
            return value
        return value[: 1 + next(i for i, item in enumerate(value) if type(item) is not kind)]

    return BeforeValidator(cut)


Integers = Annotated[list[int], _to_first_wrong(int)]
Strings = Annotated[list[str], _to_first_wrong(str)]
Objects = Annotated[list[dict[str, Any]], _to_first_wrong(dict)]


class RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(RequestModel):
    """What both kinds of completion take."""

    model: str | None = None
    n: int | None = documented(minimum=1, maximum=MAX_N)
    temperature: float | None = documented(minimum=0, maximum=2)
    top_p: float | None = documented(exclusiveMinimum=0, maximum=1)
    top_k: int | None = documented(minimum=-1)
    min_p: float | None = documented(minimum=0, maximum=1)
    seed: int | None = documented(minimum=-(2**63), maximum=2**63 - 1)
    presence_penalty: float | None = documented(minimum=-2, maximum=2)
    frequency_penalty: float | None = documented(minimum=-2, maximum=2)
    repetition_penalty: float | None = documented(exclusiveMinimum=0, maximum=10)
    logit_bias: dict[str, Any] | None = documented(additionalProperties={"type": "number"})
    stop: Stop = None
    stop_token_ids: Integers | None = documented(items={"type": "integer", "minimum": 0})
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = documented(minimum=0)
    max_tokens: int | None = documented(minimum=0)
    prompt_logprobs: int | None = documented(minimum=0, maximum=MAX_LOGPROBS)
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = documented(minimum=-(2**31), maximum=2**31 - 1)
    cache_salt: str | None = documented(minLength=1, maxLength=MAX_SALT_LENGTH)
    request_id: str | None = documented(pattern=f"^{REQUEST_ID}$")
    user: Any = None  # a note to the provider, of no effect
    response_format: dict[str, Any] | None = documented(properties={"type": {"enum": list(FORMATS)}}, required=["type"])
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    grammar: str | None = None


class ChatFields(RequestModel):
    """What decides the prompt of a chat; /tokenize takes the same."""

    messages: Objects = Field(json_schema_extra={"minItems": 1, "items": MESSAGE})
    tools: Objects | None = documented(items=TOOL)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = documented(
        properties={"type": {"enum": ["enabled", "disabled"]}}, required=["type"], additionalProperties=False
    )
    enable_thinking: bool | None = None
    reasoning_effort: str | None = documented(enum=[*EFFORTS, None])


class ChatCompletionRequest(ChatFields, SamplingFields):
    max_completion_tokens: int | None = documented(minimum=1)
    logprobs: bool | None = None
    top_logprobs: int | None = documented(minimum=0, maximum=MAX_LOGPROBS)
    include_reasoning: bool | None = None


class CompletionRequest(SamplingFields):
    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = documented(minimum=0, maximum=MAX_LOGPROBS)


class TokenizeRequest(ChatFields):
    """Either `prompt` or `messages`."""

    model_config = ConfigDict(json_schema_extra=either("prompt", TEXT_OR_EMPTY, "messages", {"type": "array"}))

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = documented(items=MESSAGE)
    # Beside a prompt these mean nothing, whatever they hold.
    tools: Objects | None = None
    thinking: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    # vLLM's name, which evaluation tools send. Kimi's tokenizer adds none by itself, so both values mean the same.
    add_special_tokens: bool | None = None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: Integers = Field(json_schema_extra={"items": {"type": "integer", "minimum": 0}})


class AbortRequest(RequestModel):
    """Either `request_id`, which is an answer's `id` or what its sender called the request, or `abort_all`."""

    model_config = ConfigDict(json_schema_extra=either("request_id", TEXT_OR_EMPTY, "abort_all", {"const": True}))

    request_id: str | None = None
    abort_all: bool | None = None
