"""An engine core without a model: each request emits the token ids of a script, with the text rules of the real one."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property

from engine.comm.meter import KINDS
from engine.config import EngineConfig
from engine.errors import InvalidRequestError
from engine.grammar.grammars import Grammars
from engine.request import CompletionDelta, Logprob, RequestMetrics
from engine.sampling_params import SamplingParams
from engine.stats import AnswerStats, EngineStats, SpeculationSnapshot
from engine.stop_strings import StopStrings
from engine.tokenizer import IncrementalDecoder


@dataclass
class FakeSequence:
    request_id: str
    index: int
    params: SamplingParams
    script: deque[int]
    decoder: IncrementalDecoder
    stops: StopStrings
    num_tokens: int = 0
    num_steps: int = 0
    prompt_logprobs: list | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.index


@dataclass
class FakeCore:
    """`scripts` are taken in order, one for each choice; when they run out, `default_script` is used.

    Each step gives every running choice `tokens_per_step` tokens; a list says it for each of a choice's steps in turn,
    and over again, as speculation would. `gate`, if set, lets one step pass per release;
    `fail_at` is the number of the step that raises.
    """

    tokenizer: object
    chat_template: object
    max_model_len: int = 256
    model_name: str = "tiny"
    generation_defaults: dict = field(default_factory=dict)
    default_script: list[int] = field(default_factory=list)
    tokens_per_step: int | list[int] = 1
    gate: threading.Semaphore | None = None
    fail_at: int | None = None
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    max_num_seqs: int = 10**6
    config: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        self.vocab_size = self.tokenizer.vocab_size
        self.scripts: deque[list[int]] = deque()
        self.running: dict[tuple[str, int], FakeSequence] = {}
        self.requests: list[tuple[str, list[int], SamplingParams]] = []
        self.aborted: list[str] = []
        self.ended: list[CompletionDelta] = []
        self.num_steps = self.num_begun = self.num_flushes = 0
        self.is_shut_down = False
        self.changed = threading.Condition()
        self.threads: set[int] = set()
        self.failure: str | None = None
        self.comm_choice: dict = {}
        self.speculation: SpeculationSnapshot | None = None

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.threads.add(threading.get_ident())
        params.check_vocab(self.vocab_size)
        if not all(0 <= token < self.vocab_size for token in prompt_token_ids):
            raise InvalidRequestError("prompt holds a token id outside the vocabulary.", param="prompt")

    @cached_property
    def check_structured_outputs(self):
        return Grammars(self.tokenizer, self.vocab_size).check

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.requests.append((request_id, prompt_token_ids, params))
        for index in range(params.n):
            script = deque(self.scripts.popleft() if self.scripts else self.default_script)
            decoder = IncrementalDecoder(self.tokenizer, params.skip_special_tokens)
            stops = StopStrings(params.stop, params.include_stop_str_in_output)
            sequence = FakeSequence(request_id, index, params, script, decoder, stops)
            if params.prompt_logprobs is not None:
                sequence.prompt_logprobs = self._prompt_logprobs(prompt_token_ids, params.prompt_logprobs)
            self.running[sequence.key] = sequence
        with self.changed:
            self.changed.notify_all()

    def abort_request(self, request_id: str) -> None:
        with self.changed:
            self.aborted.append(request_id)
            gone = [s for s in self.running.values() if s.request_id == request_id]
            self.ended += [CompletionDelta(request_id, s.index, "", [], finish_reason="abort") for s in gone]
            self.running = {key: s for key, s in self.running.items() if s.request_id != request_id}
            self.changed.notify_all()

    def has_unfinished(self) -> bool:
        return bool(self.running or self.ended)

    def step(self) -> list[CompletionDelta]:
        if self.ended:
            ended, self.ended = self.ended, []
            return ended
        # The timeout lets aborts and the end of the client through while a test holds the gate.
        if self.gate is not None and not self.gate.acquire(timeout=0.02):
            return []
        self.threads.add(threading.get_ident())
        self.num_steps += 1
        if self.num_steps == self.fail_at:
            raise RuntimeError("secret detail of rank 3")
        scheduled = list(self.running.values())[: self.max_num_seqs]
        self.num_begun += sum(sequence.num_tokens == 0 for sequence in scheduled)
        deltas = [self._advance(sequence) for sequence in scheduled]
        with self.changed:
            self.changed.notify_all()
        return deltas

    @property
    def num_unbegun(self) -> int:
        return sum(sequence.num_tokens == 0 for sequence in self.running.values())

    @property
    def num_seats(self) -> int:
        return self.max_num_seqs

    @property
    def num_free_seats(self) -> int:
        return max(self.max_num_seqs - sum(sequence.num_tokens > 0 for sequence in self.running.values()), 0)

    def flush_prefix_cache(self) -> None:
        self.num_flushes += 1

    def stats(self) -> EngineStats:
        """Made-up numbers but for what runs; times and choices are not its business."""
        self.threads.add(threading.get_ident())
        answers, kinds = AnswerStats(), dict.fromkeys(KINDS, 0)
        return EngineStats(
            len(self.running), 0, 0.0, {}, 0, 0, 0, self.num_steps, 0, 0, answers.finished,
            answers.time_to_first_token.snapshot(), answers.inter_token_latency.snapshot(),
            answers.e2e_latency.snapshot(), answers.queue_time.snapshot(), answers.prefill_time.snapshot(),
            answers.decode_time.snapshot(), kinds, kinds, {}, self.comm_choice, self.speculation,
        )  # fmt: skip

    counts_experts = False

    def on_failure(self, callback) -> None:
        self._on_failure = callback

    def lose_a_rank(self) -> None:
        """What the real core does from another thread when a rank dies, whether or not a step runs."""
        self.failure = "secret: rank 1 was killed"
        self._on_failure()

    def shutdown(self) -> None:
        self.is_shut_down = True

    def wait_for(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=10), "the core never got there"

    def _advance(self, sequence: FakeSequence) -> CompletionDelta:
        params, token_ids, text, reason, stop_reason = sequence.params, [], "", None, None
        for _ in range(self._step_size(sequence)):
            token_ids.append(sequence.script.popleft() if sequence.script else self.tokenizer.im_end_id)
            sequence.num_tokens += 1
            piece, reason, stop_reason = self._take_token(sequence, token_ids[-1])
            text += piece
            if reason:
                del self.running[sequence.key]
                break
        sequence.num_steps += 1
        prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        logprobs = None
        if params.logprobs is not None:
            logprobs = [self._logprobs(token, params.logprobs) for token in token_ids]
        metrics = None
        if reason is not None:
            metrics = RequestMetrics(0.0, 0.0, self.num_draft_tokens, self.num_accepted_tokens, self.num_cached_tokens)
        return CompletionDelta(
            sequence.request_id,
            sequence.index,
            text,
            token_ids,
            logprobs,
            prompt_logprobs,
            reason,
            stop_reason,
            metrics,
            self.num_cached_tokens if sequence.num_tokens == len(token_ids) else None,
        )

    def _step_size(self, sequence: FakeSequence) -> int:
        sizes = self.tokens_per_step
        return sizes if isinstance(sizes, int) else sizes[sequence.num_steps % len(sizes)]

    def _take_token(self, sequence: FakeSequence, token: int) -> tuple[str, str | None, str | int | None]:
        """Text, finish reason and stop reason that one token brings."""
        params, reason, stop_reason = sequence.params, None, None
        ends = {self.tokenizer.im_end_id: None} | {token: token for token in params.stop_token_ids}
        text = ""
        if token in ends and not params.ignore_eos:
            reason, stop_reason = "stop", ends[token]
        else:
            text = sequence.decoder.push([token])
            reason = "length" if sequence.num_tokens == params.max_tokens else None
        text = sequence.stops.push(text + (sequence.decoder.finish() if reason else ""))
        if sequence.stops.matched is not None:
            return text, "stop", sequence.stops.matched
        return text + (sequence.stops.flush() if reason else ""), reason, stop_reason

    def _logprobs(self, token: int, count: int) -> dict[int, Logprob]:
        """The token is the most likely one, its successors follow; the last is impossible."""
        ids = [(token + i) % self.vocab_size for i in range(max(count, 1))]
        values = [-0.5 * i for i in range(len(ids))]
        if count > 2:
            values[-1] = float("-inf")
        return {t: Logprob(v, i + 1) for i, (t, v) in enumerate(zip(ids, values, strict=True))}

    def _prompt_logprobs(self, prompt: list[int], count: int) -> list[dict[int, Logprob] | None]:
        return [None, *(self._logprobs(token, count) for token in prompt[1:])]
