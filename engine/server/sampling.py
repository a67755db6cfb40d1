"""From request fields to `SamplingParams`: defaults of the checkpoint, and the room the context leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams
from engine.server.errors import bad_request
from engine.server.protocol import SamplingFields

PASSED_ON = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "priority",
    "cache_salt",
)
FROM_CHECKPOINT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_params(
    body: SamplingFields, defaults: dict[str, Any], renamed: dict[str, str], **fixed: Any
) -> SamplingParams:
    """The request's own values, else those of generation_config.json (`defaults`), else OpenAI's; `fixed` wins.

    `renamed` maps a SamplingParams field to what the request calls it, for error messages.
    """
    values = {name: defaults[name] for name in FROM_CHECKPOINT if defaults.get(name) is not None}
    values |= {name: getattr(body, name) for name in PASSED_ON if getattr(body, name) is not None}
    try:
        return SamplingParams(**values | fixed)
    except InvalidRequestError as exc:
        name = renamed.get(exc.param or "", exc.param)
        message = str(exc).replace(exc.param or "", name or "", 1)
        raise bad_request(message, name, exc.code) from None


def fit_context(params: SamplingParams, prompt_len: int, max_model_len: int, param: str) -> SamplingParams:
    """Cuts max_tokens to what the context holds after the prompt; the answer then ends with `length`.

    `param` is the field that holds the prompt. Raises InvalidRequestError (context_length_exceeded) if there is no
    room for even one token.
    """
    room = max_model_len - prompt_len
    if room < 1:
        raise InvalidRequestError(
            f"The prompt has {prompt_len} tokens, but the context holds {max_model_len} with at least one for the "
            "answer; shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    return replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))


def check_stream_options(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is allowed only with stream: true.", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not supported with stream: true.", "prompt_logprobs")
