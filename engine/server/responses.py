"""The shape of what we answer, for the OpenAPI page; the tests hold every answer against it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    error: ErrorDetail


class PromptTokensDetails(ResponseModel):
    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseModel):
    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(ResponseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(ResponseModel):
    """`arguments` are JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ResponseModel):
    """`reasoning` and `reasoning_content` are the same under two names; both are absent where thinking is off."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None


class ChoiceBase(ResponseModel):
    index: int
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChoice(ChoiceBase):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class FunctionDelta(ResponseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """The first of a call has `id`, `type` and the name; those after it have more of the arguments alone."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(ResponseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ChoiceBase):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class Answer(ResponseModel):
    """`warnings` lists what was ignored in the request, e.g. a misspelt field."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    warnings: list[str] | None = None


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletionChunk(Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ChoiceBase):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Health(ResponseModel):
    status: Literal["ok"]


class StartProgress(ResponseModel):
    """Bytes of weights over all ranks in the phase "reading weights"; `rank_behind`: whom the others wait for."""

    phase: str
    bytes_done: int
    bytes_total: int
    percent: int
    gb_per_second: float
    seconds_left: float | None
    rank_behind: int | None


class Loading(ErrorResponse):
    """What /health answers before the engine stands."""

    status: Literal["loading"]
    progress: StartProgress


class Load(ResponseModel):
    """Answers that run and wait; `max_queued_requests` of them may wait (null: any number). Blocks of the KV cache are
    "free", "cached" or "held"."""

    num_requests_running: int
    num_requests_waiting: int
    max_queued_requests: int | None
    kv_cache_usage_ratio: float
    kv_cache_blocks: dict[str, int]
    is_draining: bool


class Flushed(ResponseModel):
    status: Literal["flushed"]


class Version(ResponseModel):
    version: str


class ExpertLoad(ResponseModel):
    """`layers[l][e]`: tokens that layer first_moe_layer + l sent to expert e; `ranks[l][r]`: rank r's share of them."""

    layers: list[list[int]]
    first_moe_layer: int
    num_tokens: int
    rank_imbalance_ratio: float | None
    ranks: list[list[float]]


class Tokens(ResponseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    warnings: list[str] | None = None


class RenderedChat(ResponseModel):
    model: str
    prompt: str
    prompt_token_ids: list[int]
    count: int
    max_model_len: int
    warnings: list[str] | None = None


class TokenizerInfo(ResponseModel):
    """Token names as `tokenizer_config.json` spells them; /tokenize turns each into its one id."""

    bos_token: str
    eos_token: str
    pad_token: str
    vocab_size: int
    model_max_length: int


class ServerInfo(ResponseModel):
    """`engine` has settings by the names of the flags, `limits` how much a request may hold."""

    version: str
    model: str
    served_model_names: list[str]
    max_model_len: int
    vocab_size: int
    has_draft: bool
    engine: dict[str, str | int | float | bool | None]
    limits: dict[str, int]


class Aborted(ResponseModel):
    num_aborted: int


class DetokenizedPrompt(ResponseModel):
    prompt: str
    warnings: list[str] | None = None


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a route that may fail with these statuses."""
    return {status: {"model": ErrorResponse} for status in statuses}
