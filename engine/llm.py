"""`LLM`: the engine inside a Python program."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from engine.config import ConfigError, EngineConfig
from engine.errors import EngineDeadError, InvalidRequestError
from engine.expert_load import ExpertLoad
from engine.launch import Follower, start_engine
from engine.request import (
    CompletionDelta,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    completion_delta_from_dict,
    request_output_from_dict,
)
from engine.sampling_params import SamplingParams

Prompt = str | list[int]


class LLM:
    """Loads a model and answers in process; the settings are those of `EngineConfig`.

    `model=None` is the bundled tiny checkpoint. With tp > 1 the other ranks are started here and end with this object
    or this process; under torchrun the object joins them, every rank runs the same calls and gets the same results.
    Threads may call it at once. Usable as a context manager. Raises ConfigError or CheckpointError for settings or
    files that cannot work.
    """

    def __init__(self, model: str | None = None, **settings: Any):
        try:
            self.config = EngineConfig(model=model, **settings)
        except TypeError as error:
            raise ConfigError(f"LLM: {error}; the settings are those of EngineConfig.") from None
        self._engine, self._ranks = start_engine(self.config)
        self._finalizer = weakref.finalize(self, self._ranks.close)
        self._ids = itertools.count()
        self._deltas: dict[str, deque[CompletionDelta]] = {}
        # The engine is one thread's. Held for a step at a time; entered again if a stream is collected within one.
        self._lock = threading.RLock()

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
        with self._call() as call:
            return self._run(call, _as_list(prompts), sampling_params)

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
        become control tokens. Reasoning and answer come as one text, split by `</think>` as the model writes it;
        structured outputs bind what comes after it."""
        if isinstance(self._engine, Follower):
            return self.generate([])
        with self._call() as call:
            prompts = self._render(messages, tools, add_generation_prompt, chat_template_kwargs)
            several = _params_list(sampling_params, len(prompts))
            return self._run(call, prompts, list(map(self._behind_reasoning, prompts, several)))

    def _behind_reasoning(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        if params.structured_outputs is None:
            return params
        tokenizer = self._engine.tokenizer
        bound = params.structured_outputs.begun_by(prompt, tokenizer.think_begin_id, tokenizer.think_end_id)
        return replace(params, structured_outputs=bound)

    def _render(self, messages: Any, tools: Any, add_generation_prompt: bool, switches: Any) -> list[list[int]]:
        several = isinstance(messages, list) and messages and isinstance(messages[0], list)
        template = self._engine.chat_template
        if template is None:
            raise InvalidRequestError(f"{self.config.model} has no chat template; use generate with a prompt.")
        encode = functools.partial(
            template.encode,
            self._engine.tokenizer,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **template.check_switches(switches),
        )
        return [encode(conversation) for conversation in (messages if several else [messages])]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[CompletionDelta]:
        """Completes one prompt piece by piece. Closing the iterator early aborts the request."""
        if isinstance(self._engine, Follower):
            yield from (completion_delta_from_dict(d) for d in self._follow())
            return
        with self._call() as call:
            (params,) = _params_list(sampling_params, 1)
            items = _as_list(prompt)
            if len(items) != 1:
                raise InvalidRequestError("stream takes one prompt: text or token ids.", param="prompt")
            self._add(call, self._output(items[0]), params)
            for delta in self._read(call):
                if self._ranks.joined:
                    call.value.append(asdict(delta))
                yield delta

    def expert_load(self) -> ExpertLoad:
        """Tokens routed to each expert so far, by layer, and the ranks' shares of them.

        Raises InvalidRequestError where expert_load is off.
        """
        if isinstance(self._engine, Follower):
            return ExpertLoad(**self._follow()[0])
        with self._call() as call:
            with self._lock, _interrupts_wait():
                load = self._engine.expert_load()
            call.value = [asdict(load)]
            return load

    def get_tokenizer(self):
        """The model's tokenizer."""
        return self._engine.tokenizer

    def close(self) -> None:
        """Ends the other ranks and frees the process group; also done when the object or the process ends."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self) -> list[dict]:
        """What rank 0's call returned; raises what it raised."""
        value = self._engine.follow()
        if value is None:
            raise EngineDeadError(self._engine.failure or "rank 0 ended before its call did.")
        if value and "error" in value[0]:
            raise InvalidRequestError(**value[0]["error"])
        return value

    @contextlib.contextmanager
    def _call(self) -> Iterator[_Call]:
        """One call of the public interface. Leaves nothing of it running behind, however it ends, and tells ranks that
        make the same call under torchrun what came of it."""
        if not self._finalizer.alive:
            raise EngineDeadError("this engine was closed; make a new LLM.")
        if self._ranks.joined and self._deltas:
            raise RuntimeError("under torchrun a stream must be read or closed before the next call.")
        call = _Call()
        try:
            yield call
        except InvalidRequestError as error:
            call.value = [{"error": {"message": str(error), "param": error.param, "code": error.code}}]
            raise
        finally:
            self._end(call)
            if self._ranks.joined and self._engine.failure is None:
                self._engine.return_to_ranks(call.value)

    def _end(self, call: _Call) -> None:
        with self._lock:
            for request_id in call.request_ids:
                del self._deltas[request_id]
                self._engine.abort_request(request_id)
        while self._engine.failure is None and self._engine.has_unfinished() and not self._deltas:
            self._step()

    def _output(self, prompt: Prompt) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        ids = self._engine.tokenizer.encode(prompt, allow_special=True) if text is not None else list(prompt)
        return RequestOutput(f"request-{next(self._ids)}", text, ids)

    def _run(
        self, call: _Call, prompts: list[Prompt], params: SamplingParams | list[SamplingParams] | None
    ) -> list[RequestOutput]:
        requests = list(zip(map(self._output, prompts), _params_list(params, len(prompts)), strict=True))
        for output, sp in requests:
            self._engine.validate(output.prompt_token_ids, sp)
        outputs = {output.request_id: output for output, _ in requests}
        for output, sp in requests:
            self._add(call, output, sp)
            output.outputs = [CompletionOutput(i, logprobs=_list_if(sp.logprobs)) for i in range(sp.n)]
        for delta in self._read(call):
            _take(outputs[delta.request_id], delta)
        if self._ranks.joined:
            call.value = [asdict(o) for o in outputs.values()]
        return list(outputs.values())

    def _add(self, call: _Call, output: RequestOutput, params: SamplingParams) -> None:
        with self._lock:
            self._engine.add_request(output.request_id, output.prompt_token_ids, params)
            self._deltas[output.request_id] = deque()
        call.request_ids.append(output.request_id)
        call.num_running += params.n

    def _read(self, call: _Call) -> Iterator[CompletionDelta]:
        """The call's deltas until all its answers are finished; those of other open streams wait for their readers."""
        while call.num_running:
            self._step()
            for waiting in [self._deltas[request_id] for request_id in call.request_ids]:
                while waiting:
                    delta = waiting.popleft()
                    call.num_running -= delta.finish_reason is not None
                    yield delta

    def _step(self) -> None:
        with self._lock:
            with _interrupts_wait():
                deltas = self._engine.step()
            for delta in deltas:
                if delta.request_id in self._deltas:
                    self._deltas[delta.request_id].append(delta)


@dataclass
class _Call:
    """value: what other ranks of torchrun are told."""

    request_ids: list[str] = field(default_factory=list)
    num_running: int = 0
    value: list[dict] = field(default_factory=list)


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """A Ctrl-C takes effect after the block, since half a step would leave the ranks apart; a second one at once."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    received = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if received:
        raise KeyboardInterrupt


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
        is_first = not any(other.finish_reason for other in output.outputs)
        answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.metrics is not None:
            output.metrics = delta.metrics if is_first else _both(output.metrics, delta.metrics)


def _both(before: RequestMetrics, answer: RequestMetrics) -> RequestMetrics:
    """Of a request with one more answer: the times of the longest, the guesses of all, and the cached tokens that none
    of them had to compute."""
    return replace(
        answer if answer.decode_time >= before.decode_time else before,
        num_cached_tokens=min(before.num_cached_tokens, answer.num_cached_tokens),
        num_draft_tokens=before.num_draft_tokens + answer.num_draft_tokens,
        num_accepted_tokens=before.num_accepted_tokens + answer.num_accepted_tokens,
    )


def _as_list(prompts: Prompt | list[str] | list[list[int]]) -> list[Prompt]:
    """A single prompt becomes a list of one; a list of ints is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    is_list = isinstance(prompts, list | tuple)
    if is_list and prompts and all(isinstance(p, int) for p in prompts):
        return [list(prompts)]
    if not is_list or not all(
        isinstance(p, str) or (isinstance(p, list) and all(isinstance(t, int) for t in p)) for p in prompts
    ):
        raise InvalidRequestError("prompts must be a string, strings, or lists of token ids.", param="prompts")
    return list(prompts)


def _params_list(params: SamplingParams | list[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if isinstance(params, list):
        if len(params) != count:
            raise InvalidRequestError(
                f"{count} prompts came with {len(params)} sampling parameters; give one or as many as prompts.",
                param="sampling_params",
            )
    else:
        params = [SamplingParams() if params is None else params] * count
    if not all(isinstance(p, SamplingParams) for p in params):
        raise InvalidRequestError("sampling_params must be SamplingParams or a list of them.", param="sampling_params")
    return params
