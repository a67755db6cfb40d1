"""`LLM`: the engine inside a Python program."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from engine.config import ConfigError, EngineConfig
from engine.launch import Follower, start_engine
from engine.request import (
    CompletionDelta,
    CompletionOutput,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
    completion_delta_from_dict,
    request_output_from_dict,
)

Prompt = str | list[int]


class LLM:
    """Loads a model and answers in process; see DESIGN-named settings in `EngineConfig`.

    `model=None` is the bundled tiny checkpoint. With tp > 1 the other ranks are started here and end with this object
    or this process; under torchrun the object joins them, every rank runs the same calls and gets the same results.
    Usable as a context manager. Raises ConfigError or CheckpointError for settings or files that cannot work.
    """

    def __init__(self, model: str | None = None, **settings: Any):
        try:
            self.config = EngineConfig(model=model, **settings)
        except TypeError as error:
            raise ConfigError(f"LLM: {error}; the settings are those of EngineConfig.") from None
        self._engine, self._ranks = start_engine(self.config)
        self._finalizer = weakref.finalize(self, self._ranks.close)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt: text, whose control tokens are read as such, or token ids. Results in prompt order.

        Raises InvalidRequestError before any work if one of them can never be served.
        """
        if isinstance(self._engine, Follower):
            return [request_output_from_dict(d) for d in self._follow()]
        items = _as_list(prompts)
        params = _params_list(sampling_params, len(items))
        with self._call():
            outputs = self._run([(self._output(p), sp) for p, sp in zip(items, params, strict=True)])
            if self._ranks.joined:
                self._engine.return_to_ranks([asdict(o) for o in outputs])
        return outputs

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        *,
        tools: list[dict] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, rendered with the checkpoint's template; text in messages can never
        become control tokens. Reasoning and answer come as one text, split by `</think>` as the model writes it."""
        if isinstance(self._engine, Follower):
            return self.generate([])
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        template = self._engine.chat_template
        if template is None:
            raise ConfigError(f"{self.config.model} has no chat template; use generate with a prompt.")
        prompts = [
            template.encode(
                self._engine.tokenizer,
                conversation,
                tools,
                add_generation_prompt=add_generation_prompt,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[CompletionDelta]:
        """Completes one prompt piece by piece. Closing the iterator early aborts the request."""
        if isinstance(self._engine, Follower):
            yield from (completion_delta_from_dict(d) for d in self._follow())
            return
        output = self._output(prompt)
        sent = []
        with self._call():
            self._engine.add_request(output.request_id, output.prompt_token_ids, sampling_params or SamplingParams())
            while self._engine.has_unfinished():
                for delta in self._engine.step():
                    sent.append(delta)
                    yield delta
            if self._ranks.joined:
                self._engine.return_to_ranks([asdict(d) for d in sent])

    def get_tokenizer(self):
        """The model's tokenizer; on rank 0 only."""
        return self._engine.tokenizer

    def close(self) -> None:
        """Ends the other ranks and frees the process group; also done when the object or the process ends."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self) -> list[dict]:
        value = self._engine.follow()
        if value is None:
            raise RuntimeError("rank 0 ended before its call did.")
        return value

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Leaves nothing running behind, however the call ends."""
        try:
            yield
        finally:
            if self._engine.failure is None:
                for request_id in self._engine.unfinished_ids():
                    self._engine.abort_request(request_id)
                while self._engine.has_unfinished():
                    self._engine.step()

    def _output(self, prompt: Prompt) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        ids = self._engine.tokenizer.encode(prompt, allow_special=True) if text is not None else list(prompt)
        return RequestOutput(f"request-{next(self._ids)}", text, ids)

    def _run(self, requests: list[tuple[RequestOutput, SamplingParams]]) -> list[RequestOutput]:
        for output, params in requests:
            self._engine.validate(output.prompt_token_ids, params)
        outputs = {}
        for output, params in requests:
            self._engine.add_request(output.request_id, output.prompt_token_ids, params)
            output.outputs = [CompletionOutput(i, logprobs=_list_if(params.logprobs)) for i in range(params.n)]
            outputs[output.request_id] = output
        while self._engine.has_unfinished():
            for delta in self._engine.step():
                _take(outputs[delta.request_id], delta)
        return list(outputs.values())


def _list_if(wanted: int | None) -> list | None:
    return None if wanted is None else []


def _take(output: RequestOutput, delta: CompletionDelta) -> None:
    """Adds what a step brought to the collected result."""
    answer = output.outputs[delta.index]
    answer.text += delta.text
    answer.token_ids += delta.token_ids
    if delta.logprobs is not None and answer.logprobs is not None:
        answer.logprobs += delta.logprobs
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = delta.prompt_logprobs
    if delta.finish_reason is not None:
        answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.metrics is not None and delta.metrics.decode_time >= output.metrics.decode_time:
            output.metrics = delta.metrics


def _as_list(prompts: Prompt | list[str] | list[list[int]]) -> list[Prompt]:
    """A single prompt becomes a list of one; a list of ints is one prompt of token ids."""
    if isinstance(prompts, str) or (prompts and all(isinstance(p, int) for p in prompts)):
        return [prompts]
    if not all(isinstance(p, str) or (isinstance(p, list) and all(isinstance(t, int) for t in p)) for p in prompts):
        raise InvalidRequestError("prompts must be a string, strings, or lists of token ids.", param="prompts")
    return list(prompts)


def _params_list(params: SamplingParams | list[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if isinstance(params, list):
        if len(params) != count:
            raise InvalidRequestError(
                f"{count} prompts came with {len(params)} sampling parameters; give one or as many as prompts.",
                param="sampling_params",
            )
        return params
    return [params or SamplingParams()] * count
