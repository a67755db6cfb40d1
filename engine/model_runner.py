"""Runs the model on one rank: picks the concrete backends, owns weights and cache, executes what was scheduled."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from engine import cache_plan, memory, rehearsal, sampling, segments, verify
from engine.batch import ForwardBatch
from engine.cache_plan import BLOCK_SIZE
from engine.comm import choice, meter
from engine.comm.choice_rule import INVARIANT_ROWS
from engine.comm.collectives import agree_on_minimum, all_reduce
from engine.comm.dispatcher import DispatchLimits
from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.decode_batch import BlockTable, DecodeBatch, bucket_sizes
from engine.decode_step import DecodeStep, Variant, variants
from engine.expert_load import ExpertLoad
from engine.grammar import Grammars
from engine.graph import CudaRecorder, DecodeGraph, GraphRunner, Recorder, capture_obstacle
from engine.host_blocks import HostBlocks
from engine.input_batch import InputBatch
from engine.loading.progress import MEASURING, LoadProgress
from engine.loading.weights import Checkpoint
from engine.log import logger
from engine.model_files import ModelFiles
from engine.model_loading import dispatch_limits, draft_dispatcher, load_draft, load_share
from engine.request import Request
from engine.sampled_step import Forwarded, SampledStep
from engine.sampling import LogitShaper, SampledLogprobs, gather_logprobs
from engine.scheduler import ScheduledRequest, SchedulerOutput
from engine.segments import SegmentRunner
from engine.step_output import ModelRunnerOutput, PromptLogprobs, ReadBuffers

LOGIT_ROWS = 256


class ModelRunner:
    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        parallel: ParallelState,
        checkpoint: Checkpoint | None = None,
        progress: LoadProgress | None = None,
    ):
        """checkpoint, progress: as `load_share` takes them."""
        progress = progress or LoadProgress()
        self.config, self.parallel = config, parallel
        self.model_config = files.model_config
        self.model = load_share(config, files, parallel, checkpoint, progress)
        self.drafter = load_draft(config, files, parallel, self.model, progress)
        progress.meet("model and draft are read")
        progress.enter(MEASURING)
        self.num_guesses = 0 if self.drafter is None else config.num_draft_tokens
        self.overlaps = parallel.device.type == "cuda"
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        limits = dispatch_limits(config, files)
        self.dispatchers = self._choose_dispatchers(limits)
        self.draft_dispatcher = None if self.drafter is None else draft_dispatcher(parallel, limits)
        self.input_batch = InputBatch(BLOCK_SIZE, parallel.device, self.max_num_seqs, self.num_guesses)
        self.sampled = self.input_batch.sampled
        self.sampled_step = SampledStep(
            self.sampled.state, BLOCK_SIZE, *self._operations(), self.drafter, self.draft_dispatcher, parallel.meter
        )
        self.shape_logits = LogitShaper(parallel.device)
        self.grammars = Grammars(files.tokenizer, self.model_config.vocab_size)
        self.graphs: GraphRunner | None = None
        self.segments: SegmentRunner | None = None
        self._reads = ReadBuffers(self.max_num_seqs, self.num_guesses, parallel.device)
        rehearsal.compile_kernels(self)
        self.host_blocks = self._make_host_blocks(files)
        recorder = self._recorder()
        self._gauge = memory.GpuGauge(parallel.device) if self.overlaps else None
        use = None if self._gauge is None else memory.measure(self, self._gauge, recorder)
        self.limits = memory.settle(self, files, use)
        self.max_model_len, self.num_blocks = self.limits.longest, self.limits.num_blocks
        self.hold_caches(self.num_blocks)
        if recorder is not None:
            self.capture_all(recorder)
        experts, attention = self.dispatchers.name, self.model.backend.name
        logger.info("ep=%d experts over %s, attention %s; %s", parallel.ep, experts, attention, self.limits.sentence())
        if self.num_guesses and self.verifiable(1) == [0]:
            logger.warning("no step has room for a guess: the draft is of no use; raise max_num_batched_tokens.")
        self.prefill_times = rehearsal.prefill_times(self) if self.overlaps and config.longest_step is not None else []
        parallel.meter.clear()
        if self.model.expert_counts is not None:
            self.model.expert_counts.zero_()
        if self._gauge is not None:
            self._gauge.keep_free(use.margin // 2)

    def _operations(self) -> tuple[Any, Any]:
        """The modules of `greedy`, `draw` and of `verify_rows`, `accept`, `next_place`: kernels, or plain twins."""
        if self.parallel.device.type == "cpu":
            return sampling, verify
        from engine.kernels.gpu import sample
        from engine.kernels.gpu import verify as verify_kernels

        return sample, verify_kernels

    def _make_host_blocks(self, files: ModelFiles) -> HostBlocks | None:
        num_slots = cache_plan.num_host_blocks(self.config, files, self.model, self.drafter)
        if not num_slots:
            return None
        width, dtype = cache_plan.row_shape(self.config, self.model)
        parts = [((self.model_config.num_hidden_layers, BLOCK_SIZE, width), dtype)]
        if self.drafter is not None:
            parts.append(((BLOCK_SIZE, self.drafter.cache_width), getattr(torch, self.config.dtype)))
        return HostBlocks(num_slots, parts, self.parallel.device)

    @property
    def num_host_blocks(self) -> int:
        return 0 if self.host_blocks is None else self.host_blocks.num_slots

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        """Between device and host, as the step's plan wants it."""
        if output.saves or output.restores:
            caches = [self.caches.transpose(0, 1)]
            caches += [] if self.drafter is None else [self.sampled_step.cache]
            self.host_blocks.copy(output.saves, output.restores, caches)

    @property
    def gathers_expert_counts(self) -> bool:
        """Whether reading them takes all ranks: where each routes its own rows; else each has counted every row."""
        return self.model.shards_tokens and not self.parallel.is_alone

    def expert_counts(self) -> torch.Tensor:
        """int64 [MoE layers, slots] on the host: tokens of all ranks sent to each physical slot, each counted once.

        Collective where `gathers_expert_counts`. Waits for the steps launched before.
        """
        counts_ME = self.model.expert_counts
        if self.gathers_expert_counts:
            with self.parallel.meter.apart():  # no step's
                counts_ME, _ = all_reduce(counts_ME.clone(), self.parallel)
        return counts_ME.cpu()

    def expert_load(self) -> ExpertLoad:
        """Collective as `expert_counts` is."""
        config = self.model_config
        return ExpertLoad.of(
            self.expert_counts().tolist(),
            config.moe_layers.start,
            config.num_experts_per_tok,
            self.model.expert_map,
            self.parallel,
        )

    def comm_choice(self) -> dict[str, dict]:
        """What was measured of dispatchers at start, and what was chosen, as `DispatcherChoice.report` tells it."""
        return self.dispatchers.report()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Before which of the target's layers the draft looks at the residual stream."""
        return () if self.drafter is None else self.drafter.feature_layers

    def round_seconds(self, num_rows: int) -> dict[str, float]:
        """What one round of each kind took at start in a step of so many rows; empty where it was not measured."""
        verbs = self.comm_choice()["rounds"].get(num_rows, {})
        return {kind: verbs[verb] / 1e6 for kind, verb in meter.VERBS.items() if verb in verbs}

    def _choose_dispatchers(self, limits: DispatchLimits) -> choice.DispatcherChoice:
        sizes = choice.measured_sizes(bucket_sizes(self.max_num_seqs), limits.max_tokens)
        return choice.DispatcherChoice(self.config.moe_comm, self.parallel, limits, sizes, self.config.comm_cache)

    def _recorder(self) -> Recorder | None:
        """None where no graph can be captured, or none is wanted."""
        if self.config.enforce_eager or not self.overlaps:
            return None
        obstacle = self.capture_obstacle()
        if obstacle is None:
            return CudaRecorder(self.parallel.device)
        logger.info("no CUDA graphs: the %s in use reads numbers on the host", obstacle)
        return None

    def capture_obstacle(self) -> str | None:
        parts = {"dispatcher": self.dispatchers} | self.model.step_parts
        if self.drafter is not None:
            parts |= {"draft": self.drafter, "draft's dispatcher": self.draft_dispatcher}
        return capture_obstacle(parts)

    def max_verify_rows(self) -> int:
        """Rows of the largest step that verifies guesses: in bfloat16 those whose results do not depend on their number
        (DESIGN.md, fact 4), so that guesses never change a word."""
        return self.config.max_num_batched_tokens if self.config.dtype == "float32" else INVARIANT_ROWS

    def decode_variants(self, sizes: list[int] | None = None) -> list[Variant]:
        """The decode steps that may occur, by default of all sizes."""
        most = min(self.max_verify_rows(), self.config.max_num_batched_tokens)
        return variants(sizes or bucket_sizes(self.max_num_seqs), self.num_guesses, most)

    def capture_all(self, recorder: Recorder) -> None:
        """Decode steps first: what they leave of the budget is for steps with chunks."""
        self.capture(recorder)
        self.segments = segments.capture(self, recorder)

    @torch.inference_mode()
    def capture(self, recorder: Recorder, sizes: list[int] | None = None) -> None:
        """Records the decode steps of `sizes` requests whose logits alone fit the budget; by default of all sizes."""
        budget = int(self.config.graph_memory_gb * 2**30)
        most_rows = budget // (4 * self.model_config.vocab_size)
        wanted = [v for v in self.decode_variants(sizes) if v.num_rows <= most_rows]
        inputs = self.decode_inputs(sorted({v.num_requests for v in wanted}))
        step = self.decode_step(max((v.num_rows for v in wanted), default=0))
        agree = functools.partial(agree_on_minimum, parallel=self.parallel)
        graphs = GraphRunner(recorder, step, budget, self.parallel.meter, agree)
        graphs.capture_all([(variant, inputs[variant.num_requests]) for variant in wanted])
        for variant, graph in graphs.captured.items():
            if seconds := self.round_seconds(variant.num_rows):
                graph.sends.estimate(seconds)
        self.graphs = graphs

    def decode_inputs(self, sizes: list[int]) -> dict[int, DecodeBatch]:
        """By number of requests. Their block table reaches beyond the longest request, as guesses' rows do."""
        longest = self.max_model_len + 3 * self.num_guesses  # an ended answer's rows, and the chain behind them
        table = BlockTable(self.max_num_seqs, -(-longest // BLOCK_SIZE), self.parallel.device)
        return {size: DecodeBatch(size, BLOCK_SIZE, table, self.sampled, self.parallel.device) for size in sizes}

    def decode_step(self, most_rows: int) -> DecodeStep:
        shape = (most_rows, self.model_config.vocab_size)
        buffer = torch.empty(shape, dtype=torch.float32, device=self.parallel.device)
        return DecodeStep(self.model, self.sampled_step, self.dispatchers.for_rows, self.caches, buffer)

    def verifiable(self, num_requests: int) -> list[int]:
        """How many guesses of each of so many requests a step may verify, none included."""
        if self.graphs is not None and self.graphs.choose(num_requests) is not None:
            return self.graphs.num_verify(num_requests)
        most = min(self.max_verify_rows(), self.config.max_num_batched_tokens) // num_requests - 1
        return list(range(max(min(most, self.num_guesses), 0) + 1))

    def replays(self, num_requests: int) -> bool:
        """Whether decodes of so many requests run as a graph, which needs no word of the host of where they start."""
        return self.graphs is not None and self.graphs.choose(num_requests) is not None

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Launches a step. Pending tokens of its requests are those of the step launched before."""
        graph = self._graph_for(output)
        self._copy_blocks(output)
        result = ModelRunnerOutput()
        if graph is not None:
            self._replay(graph, output.scheduled, result)
        else:
            self._compute(output, result)
        return result

    def _graph_for(self, output: SchedulerOutput) -> DecodeGraph | None:
        """A step of one last token of each request has one; no prompt token before it is scored there."""
        items = output.scheduled
        if self.graphs is None or not all(item.samples and item.num_tokens == 1 for item in items):
            return None
        return self.graphs.choose(len(items), output.plan)

    def _replay(self, graph: DecodeGraph, items: list[ScheduledRequest], result: ModelRunnerOutput) -> None:
        width = graph.variant.width
        graph.inputs.fill(items, width)
        self.parallel.meter.add(graph.sends)
        if any(_looks_at_logits(item.request) for item in items):
            graph.forward.replay()
            logits_NWV = graph.logits_MV[: len(items) * width].unflatten(0, (len(items), width))
            raw = self._shape(logits_NWV, items, [width - 1] * len(items))
            graph.finish.replay()
            self._logprobs(raw, items, result)
        else:
            graph.whole.replay()
        self._leave(items, result)

    def _compute(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """A step of any kind, at once."""
        batch = self.input_batch.build(output, self.dispatchers.for_rows(output.num_tokens))
        hidden_TD, features_TF = self._forward(batch)
        self._prompt_logprobs(hidden_TD, output.scheduled, batch.query_lens, result)
        next_ids_T = None if self.drafter is None else self.input_batch.next_tokens(output, batch)
        sampled = self.input_batch.sampled_rows(output, batch)
        if sampled is None:
            if self.drafter is not None:
                self.sampled_step.extend(Forwarded(batch, hidden_TD, features_TF, None, next_ids_T, batch.num_tokens_1))
            return
        items = [item for item in output.scheduled if item.samples]
        logits_MV = self.model.logits(hidden_TD[sampled.rows_M])
        raw = self._shape(logits_MV.unflatten(0, (len(items), -1)), items, [item.num_guesses for item in items])
        num_real_1 = torch.full_like(batch.num_tokens_1, len(items))
        forwarded = Forwarded(batch, logits_MV, features_TF, sampled.rows_M, next_ids_T, num_real_1)
        self.sampled_step(forwarded, sampled.requests, sampled.rows, output.plan.num_propose, sampled.draws)
        self._logprobs(raw, items, result)
        self._leave(items, result)

    def _forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The final norm's output and the draft's features of all rows."""
        graphs = self.segments and self.segments.choose(batch.token_ids_T.shape[0])
        if graphs:
            return self.segments.replay(graphs, batch)
        return self.model.forward_with_features(batch, self.caches, self.feature_layers)

    def _leave(self, items: list[ScheduledRequest], result: ModelRunnerOutput) -> None:
        """Sends what the step left on its way to the host, and to the next step."""
        self.sampled.belong_to([item.request for item in items])
        result.unread = self._reads.start(self.sampled.state, len(items))

    def _shape(
        self, logits_NWV: torch.Tensor, items: list[ScheduledRequest], verified: list[int]
    ) -> dict[int, torch.Tensor]:
        """Changes logits in place as requests ask. Returns those of the model [W, V] by place among the items, where
        their logprobs are asked for. verified: guesses of each request that may be accepted, planned or not: a graph
        verifies as many of all."""
        raw = {}
        for row, (item, num_guesses) in enumerate(zip(items, verified, strict=True)):
            if item.request.params.logprobs is not None:
                raw[row] = logits_NWV[row].clone()
            if item.request.params.shapes_logits:
                self.shape_logits(logits_NWV[row], item.request, num_guesses)
        self._forbid(logits_NWV, items, verified)
        return raw

    def _forbid(self, logits_NWV: torch.Tensor, items: list[ScheduledRequest], verified: list[int]) -> None:
        """Leaves those tokens alone that grammars allow; made by the host while the device computes the logits."""
        places = [n for n, item in enumerate(items) if item.request.params.structured_outputs is not None]
        if not places:
            return
        width = logits_NWV.shape[1]
        requests = [items[n].request for n in places]
        guesses = [request.guess_ids[: verified[n]] for n, request in zip(places, requests, strict=True)]
        rows_R, masks_RB = self.grammars.masks(requests, guesses, width)
        rows_R = np.array(places)[rows_R // width] * width + rows_R % width
        if len(rows_R):
            rows_R, masks_RB = self.input_batch.send(rows_R), self.input_batch.send(masks_RB)
            sampling.forbid(logits_NWV.view(-1, logits_NWV.shape[2]), rows_R, masks_RB)

    def _logprobs(self, raw: dict[int, torch.Tensor], items: list[ScheduledRequest], result: ModelRunnerOutput) -> None:
        """Of the tokens that are committed, whose number this waits for."""
        for row, logits_WV in raw.items():
            request = items[row].request
            count = int(self.sampled.state.accepted_S[row]) + 1
            token_ids_W = self.sampled.state.tokens_SW[row, :count]
            found = gather_logprobs(logits_WV[:count], token_ids_W, request.params.logprobs)
            result.logprobs[request.request_id] = found

    def _prompt_logprobs(
        self, hidden_TD: torch.Tensor, items: list[ScheduledRequest], query_lens: list[int], result: ModelRunnerOutput
    ) -> None:
        """Row p predicts prompt token p + 1; rows are taken a few at a time, since logits are wide."""
        ends = np.cumsum(query_lens).tolist()
        for end, item in zip(ends, items, strict=True):
            request = item.request
            stop = min(item.stop, len(request.prompt_token_ids) - 1)
            if request.params.prompt_logprobs is None or stop <= item.start:
                continue
            first_row = end - item.num_rows
            parts = SampledLogprobs([], [], [], [])
            for start in range(item.start, stop, LOGIT_ROWS):
                rows = range(start, min(start + LOGIT_ROWS, stop))
                logits_SV = self.model.logits(hidden_TD[first_row + rows.start - item.start :][: len(rows)])
                targets = torch.tensor(request.token_ids(rows.start + 1, rows.stop + 1), device=self.parallel.device)
                parts.extend(gather_logprobs(logits_SV, targets, request.params.prompt_logprobs))
            result.prompt_logprobs[request.request_id] = PromptLogprobs(item.start + 1, parts)

    def failure(self) -> str | None:
        """What a kernel has waited for in vain, if one has; the steps since then are worth nothing."""
        return self.dispatchers.failure() or (self.draft_dispatcher and self.draft_dispatcher.failure())

    def close(self) -> None:
        """Every rank calls it after its last step."""
        self.drop_graphs()
        if self._gauge is not None:
            self._gauge.keep_nothing_free()
        self.dispatchers.close()
        if self.draft_dispatcher is not None:
            self.draft_dispatcher.close()

    def drop_graphs(self) -> None:
        """Steps run without from here on."""
        for graphs in (self.graphs, self.segments):
            if graphs is not None:
                graphs.close()
        self.graphs = self.segments = None

    def hold_caches(self, num_blocks: int) -> None:
        """Zeros, since padding may read what nothing wrote. The target's: [layers, blocks, block_size, elements of a
        row as kv_cache_dtype has it]; the draft's: [blocks, block_size, its own width] in the model's type."""
        device, (width, dtype) = self.parallel.device, cache_plan.row_shape(self.config, self.model)
        shape = (self.model_config.num_hidden_layers, num_blocks, BLOCK_SIZE, width)
        self.caches = torch.zeros(*shape, dtype=dtype, device=device)
        if self.drafter is not None:
            shape = (num_blocks, BLOCK_SIZE, self.drafter.cache_width)
            self.sampled_step.cache = torch.zeros(*shape, dtype=getattr(torch, self.config.dtype), device=device)

    def drop_caches(self) -> None:
        self.caches = self.sampled_step.cache = None


def _looks_at_logits(request: Request) -> bool:
    params = request.params
    return params.shapes_logits or params.logprobs is not None or params.structured_outputs is not None
