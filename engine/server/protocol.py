"""The requests we take, as OpenAI and vLLM name them. Types are strict: "5" is no number and true is no 1.

null means absent everywhere. Ranges are checked once, in `SamplingParams`; fields that no model here names stay in
`model_extra`, where `fields.py` refuses or reports them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator, WithJsonSchema

INTEGER_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}}
STRING_LIST = {"type": "array", "items": {"type": "string"}}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


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


Stop = Annotated[
    Any, PlainValidator(_check_stop), WithJsonSchema({"anyOf": [{"type": "string"}, STRING_LIST, {"type": "null"}]})
]
Prompt = Annotated[
    Any,
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, STRING_LIST, INTEGER_LIST, {"type": "array", "items": INTEGER_LIST}]}
    ),
]


class RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(RequestModel):
    """What both kinds of completion take."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class ChatFields(RequestModel):
    """What decides the prompt of a chat; /tokenize takes the same."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


class ChatCompletionRequest(ChatFields, SamplingFields):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(SamplingFields):
    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeRequest(ChatFields):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[int]
