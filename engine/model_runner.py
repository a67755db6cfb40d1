"""Runs the model on one rank: picks the concrete backends, owns weights and cache, executes what was scheduled."""

from __future__ import annotations

import functools
import time
from types import ModuleType
from typing import Any

import numpy as np
import torch

from engine import cache_plan, sampling
from engine.attention import backend as attention_backends
from engine.cache_plan import BLOCK_SIZE
from engine.comm import choice, meter
from engine.comm.collectives import agree_on_minimum, all_reduce
from engine.comm.dispatcher import DispatchLimits, dispatcher_class
from engine.comm.parallel_state import ParallelState
from engine.config import ConfigError, EngineConfig
from engine.decode_batch import BlockTable, DecodeBatch, bucket_sizes
from engine.expert_load import ExpertLoad
from engine.expert_map import ExpertMap
from engine.graph import CudaRecorder, DecodeGraph, GraphRunner, Recorder, capture_obstacle
from engine.input_batch import InputBatch
from engine.kernels import table as kernel_table
from engine.log import logger
from engine.model_files import ModelFiles
from engine.request import Request, SamplingParams
from engine.sampling import SampledLogprobs, Sampler, SamplingRows, gather_logprobs, shapes_logits
from engine.scheduler import ScheduledRequest, SchedulerOutput
from engine.step_output import ModelRunnerOutput, PromptLogprobs, ReadBuffers, UnreadTokens
from engine.weights import CheckpointError

GPU_MEMORY_SHARE = 0.90
LOGIT_ROWS = 256
_SOME_TOKENS = 128  # more than a decode step has, less than a long prompt


class ModelRunner:
    def __init__(self, config: EngineConfig, files: ModelFiles, parallel: ParallelState):
        self.config, self.parallel = config, parallel
        self.model_config = files.model_config
        self.model = load_share(config, files, parallel)
        self.overlaps = parallel.device.type == "cuda"
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.dispatchers = self._choose_dispatchers(_dispatch_limits(config, files))
        self.input_batch = InputBatch(BLOCK_SIZE, parallel.device, self.max_num_seqs)
        self.sampled = self.input_batch.sampled
        self.sampler = Sampler(parallel.device)
        self._ops = _sampling_operations(parallel.device)
        self.graphs: GraphRunner | None = None
        self._reads = ReadBuffers(self.max_num_seqs) if self.overlaps else None
        self._compile_kernels()
        block_bytes = cache_plan.block_bytes(config, files, self.model)
        budget = self._cache_bytes()
        fitting = agree_on_minimum(budget // block_bytes, parallel)
        self.max_model_len, self.num_blocks = cache_plan.plan(config, files, block_bytes, budget, fitting)
        self.caches = self._allocate(self.num_blocks)
        logger.info(
            "%s experts over %s, attention %s, %d KV blocks of %d tokens, longest request %d tokens",
            f"ep={parallel.ep}",
            self.dispatchers.name,
            self.model.backend.name,
            self.num_blocks - 1,
            BLOCK_SIZE,
            self.max_model_len,
        )
        self._prepare_graphs()
        parallel.meter.clear()
        if self.model.expert_counts is not None:
            self.model.expert_counts.zero_()

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

    def _round_seconds(self, num_rows: int) -> dict[str, float]:
        """What one round of each kind took at start in a step of so many rows; empty where it was not measured."""
        verbs = self.comm_choice()["rounds"].get(num_rows, {})
        return {kind: verbs[verb] / 1e6 for kind, verb in meter.VERBS.items() if verb in verbs}

    def _choose_dispatchers(self, limits: DispatchLimits) -> choice.DispatcherChoice:
        sizes = choice.measured_sizes(bucket_sizes(self.max_num_seqs), limits.max_tokens)
        return choice.DispatcherChoice(self.config.moe_comm, self.parallel, limits, sizes, self.config.comm_cache)

    def _compile_kernels(self) -> None:
        """All kernels of all steps at once, since each would else be compiled where it is first launched.

        Ranks on one host share Triton's cache, so that one of them compiles."""
        device = self.parallel.device
        if device.type != "cuda" or self.model.kernels.name != "triton":
            return
        from engine.kernels.gpu import warm_up

        started = time.monotonic()
        with warm_up.recorded_launches() as launches:
            self._dry_run()
        torch.cuda.empty_cache()
        count, failures = warm_up.compile_all(launches) if not device.index else (0, [])
        agree_on_minimum(0, self.parallel)
        if failures:
            logger.warning("%s; such kernels are compiled where they are first used", failures[0])
        logger.info("%d kernels in %.1f s, %d of them compiled", len(launches), time.monotonic() - started, count)

    @torch.inference_mode()
    def _dry_run(self) -> None:
        """A step of every kind that differs in its kernels; within `recorded_launches`, so nothing of it counts."""
        most = min(self.config.max_num_batched_tokens, self.model_config.max_position_embeddings)
        for num_tokens, context in ((most, 0), (min(most, _SOME_TOKENS), 0), (min(most, 2 * BLOCK_SIZE), BLOCK_SIZE)):
            self._run_alone(num_tokens, min(context, num_tokens - 1))
        if self.capture_obstacle() is None:
            self.caches = self._allocate(2)
            table = BlockTable(self.max_num_seqs, 1, self.parallel.device)
            for size in bucket_sizes(self.max_num_seqs):
                inputs = DecodeBatch(size, BLOCK_SIZE, table, self.sampled, self.parallel.device)
                self._draw(inputs, *self._decode(inputs))
            del self.caches

    def _prepare_graphs(self) -> None:
        if self.config.enforce_eager or not self.overlaps:
            return
        obstacle = self.capture_obstacle()
        if obstacle is None:
            self.capture(CudaRecorder(self.parallel.device))
        else:
            logger.info("no CUDA graphs: the %s in use reads numbers on the host", obstacle)

    def capture_obstacle(self) -> str | None:
        return capture_obstacle({"dispatcher": self.dispatchers} | self.model.step_parts)

    @torch.inference_mode()
    def capture(self, recorder: Recorder, sizes: list[int] | None = None) -> None:
        """Records the decode steps of `sizes` rows whose logits alone fit the budget; by default of all that occur."""
        device, budget = self.parallel.device, int(self.config.graph_memory_gb * 2**30)
        table = BlockTable(self.max_num_seqs, -(-self.max_model_len // BLOCK_SIZE), device)
        most_rows = budget // (4 * self.model_config.vocab_size)
        sizes = [size for size in sizes or bucket_sizes(self.max_num_seqs) if size <= most_rows]
        batches = [DecodeBatch(size, BLOCK_SIZE, table, self.sampled, device) for size in sizes]
        agree = functools.partial(agree_on_minimum, parallel=self.parallel)
        graphs = GraphRunner(recorder, self._decode, self._draw, budget, self.parallel.meter, agree)
        graphs.capture_all(batches)
        for size, graph in graphs.captured.items():
            if seconds := self._round_seconds(size):
                graph.sends.estimate(seconds)
        self.graphs = graphs

    def _decode(self, inputs: DecodeBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """One token of every row. Returns logits [N, V] and their maxima [N]; leaves the greedy tokens."""
        token_ids_N = self._ops.take_tokens(inputs.token_ids_N, inputs.sources_N, self.sampled.tokens_S)
        hidden_ND = self.model(
            inputs.forward_batch(token_ids_N, self.dispatchers.for_rows(inputs.num_rows)), self.caches
        )
        logits_NV = self.model.logits(hidden_ND)
        return logits_NV, self._ops.greedy(logits_NV, self.sampled.tokens_S)

    def _draw(self, inputs: DecodeBatch, logits_NV: torch.Tensor, maxima_N: torch.Tensor) -> None:
        self._ops.draw(logits_NV, maxima_N, inputs.sampling, self.sampled.tokens_S)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Launches a step. Pending tokens of its requests are those of the step launched before."""
        graph = self._graph_for(output.scheduled)
        result = ModelRunnerOutput()
        if graph is not None:
            self._replay(graph, output.scheduled, result)
            return result
        batch = self.input_batch.build(output, self.dispatchers.for_rows(output.num_tokens))
        hidden_TD = self.model(batch, self.caches)
        ends = np.cumsum(batch.query_lens).tolist()
        self._prompt_logprobs(hidden_TD, output.scheduled, ends, result)
        sampling = [(end - 1, item.request) for end, item in zip(ends, output.scheduled, strict=True) if item.samples]
        if sampling:
            rows, requests = zip(*sampling, strict=True)
            logits_SV = self.model.logits(hidden_TD[self.input_batch.send(np.array(rows))])
            self._sample(logits_SV, list(requests))
            self._finish(logits_SV, list(requests), result)
        return result

    def _graph_for(self, items: list[ScheduledRequest]) -> DecodeGraph | None:
        """A step of one last token of each request has one; no prompt token before it is scored there."""
        if self.graphs is None or not all(item.samples and item.num_tokens == 1 for item in items):
            return None
        return self.graphs.choose(len(items))

    def _replay(self, graph: DecodeGraph, items: list[ScheduledRequest], result: ModelRunnerOutput) -> None:
        requests = [item.request for item in items]
        graph.inputs.fill(items)
        graph.step.replay()
        self.parallel.meter.add(graph.sends)
        if not all(request.params.greedy for request in requests):
            graph.draw.replay()
        self._finish(graph.logits_NV[: len(requests)], requests, result)

    def _sample(self, logits_SV: torch.Tensor, requests: list[Request]) -> None:
        """Each row's token as if nothing but temperature, filters and seed were asked for."""
        maxima_S = self._ops.greedy(logits_SV, self.sampled.tokens_S)
        if not all(request.params.greedy for request in requests):
            self._ops.draw(logits_SV, maxima_S, SamplingRows.of(requests, self.parallel.device), self.sampled.tokens_S)

    def _finish(self, logits_SV: torch.Tensor, requests: list[Request], result: ModelRunnerOutput) -> None:
        """Samples again where a request asks for more than the kernels do; sends the tokens on their way."""
        tokens_S = self.sampled.tokens_S[: len(requests)]
        shaped = [row for row, request in enumerate(requests) if shapes_logits(request)]
        if shaped:
            tokens_S[shaped] = self.sampler(logits_SV[shaped], [requests[row] for row in shaped])
        self._logprobs(logits_SV, tokens_S, requests, result)
        self.sampled.belong_to(requests)
        result.unread = self._reads.start(tokens_S) if self.overlaps else UnreadTokens(tokens_S.clone(), None)

    def _logprobs(
        self, logits_SV: torch.Tensor, token_ids_S: torch.Tensor, requests: list[Request], result: ModelRunnerOutput
    ) -> None:
        for row, request in enumerate(requests):
            if request.params.logprobs is not None:
                one = slice(row, row + 1)
                result.logprobs[request.request_id] = gather_logprobs(
                    logits_SV[one], token_ids_S[one], request.params.logprobs
                )

    def _prompt_logprobs(
        self, hidden_TD: torch.Tensor, items: list[ScheduledRequest], ends: list[int], result: ModelRunnerOutput
    ) -> None:
        """Row p predicts prompt token p + 1; rows are taken a few at a time, since logits are wide."""
        for end, item in zip(ends, items, strict=True):
            request = item.request
            stop = min(item.stop, len(request.prompt_token_ids) - 1)
            if request.params.prompt_logprobs is None or stop <= item.start:
                continue
            first_row = end - item.num_tokens
            parts = SampledLogprobs([], [], [], [])
            for start in range(item.start, stop, LOGIT_ROWS):
                rows = range(start, min(start + LOGIT_ROWS, stop))
                logits_SV = self.model.logits(hidden_TD[first_row + rows.start - item.start :][: len(rows)])
                targets = torch.tensor(request.token_ids(rows.start + 1, rows.stop + 1), device=self.parallel.device)
                parts.extend(gather_logprobs(logits_SV, targets, request.params.prompt_logprobs))
            result.prompt_logprobs[request.request_id] = PromptLogprobs(item.start + 1, parts)

    def failure(self) -> str | None:
        """What a kernel has waited for in vain, if one has; the steps since then are worth nothing."""
        return self.dispatchers.failure()

    def close(self) -> None:
        """Every rank calls it after its last step."""
        self.drop_graphs()
        self.dispatchers.close()

    def drop_graphs(self) -> None:
        """Steps run without from here on."""
        if self.graphs is not None:
            self.graphs.close()
        self.graphs = None

    def _allocate(self, num_blocks: int) -> torch.Tensor:
        """[layers, blocks, block_size, latent + rope width]; zeros, since padding may read what nothing wrote."""
        return torch.zeros(
            self.model_config.num_hidden_layers,
            num_blocks,
            BLOCK_SIZE,
            self.model.cache_width,
            dtype=getattr(torch, self.config.dtype),
            device=self.parallel.device,
        )

    def _cache_bytes(self) -> int:
        known = cache_plan.known_bytes(self.config)
        return self._free_gpu_bytes() - self._graph_bytes() if known is None else known

    def _graph_bytes(self) -> int:
        """Left free for graphs, which are captured last, since they hold the cache's address: all they may take."""
        without = self.config.enforce_eager or self.capture_obstacle() is not None
        return 0 if without else int(self.config.graph_memory_gb * 2**30)

    def _free_gpu_bytes(self) -> int:
        """What weights and the largest step leave of this GPU's share, measured by running that step once."""
        device = self.parallel.device
        torch.cuda.reset_peak_memory_stats(device)
        self._run_largest_step()
        free, total = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        return int(free + idle - (1 - GPU_MEMORY_SHARE) * total)

    def _run_largest_step(self) -> None:
        self._run_alone(min(self.config.max_num_batched_tokens, self.model_config.max_position_embeddings))
        torch.cuda.empty_cache()

    def _run_alone(self, num_tokens: int, context: int = 0) -> None:
        """The step of one request that ends at `num_tokens`, the first `context` of them cached, in a cache made for
        it."""
        blocks = list(range(1, -(-num_tokens // BLOCK_SIZE) + 1))
        request = Request(
            "alone", [0] * num_tokens, SamplingParams(), 0, 1, num_computed_tokens=context, block_ids=blocks
        )  # fmt: skip
        self.caches = self._allocate(len(blocks) + 1)
        self.execute(SchedulerOutput([ScheduledRequest.next_of(request, num_tokens - context)]))
        del self.caches


def _sampling_operations(device: torch.device) -> ModuleType:
    """The module with `greedy`, `draw` and `take_tokens`: kernels, or their plain twins."""
    if device.type == "cpu":
        return sampling
    from engine.kernels.gpu import sample

    return sample


def check_model(config: EngineConfig, files: ModelFiles) -> None:
    """Finds what a ModelRunner would refuse on any rank, without a process group and before any weight is read.

    Raises ConfigError with the sum, CheckpointError naming file and tensor.
    """
    _check_dispatcher(config, files)
    parallel = ParallelState(device=torch.device("meta"), **config.placement())
    model = load_share(config, files, parallel)
    budget = cache_plan.known_bytes(config)
    block_bytes = cache_plan.block_bytes(config, files, model)
    if budget is not None:
        cache_plan.plan(config, files, block_bytes, budget, budget // block_bytes)


def _check_dispatcher(config: EngineConfig, files: ModelFiles) -> None:
    """Refuses one that was named and cannot run on this host."""
    if config.moe_comm == "auto":
        return
    parallel = ParallelState(device=torch.device(config.device), **config.placement())
    reason = dispatcher_class(config.moe_comm).obstacle(parallel, _dispatch_limits(config, files))
    if reason is not None:
        raise ConfigError(f"moe_comm={config.moe_comm!r} {reason}; use one of the others or leave it out.")


def load_share(config: EngineConfig, files: ModelFiles, parallel: ParallelState) -> Any:
    """This rank's share of the model."""
    dtype = getattr(torch, config.dtype)
    device = torch.device(config.device)
    try:
        backend_name = attention_backends.choose(config.attention_backend, device, dtype)
        model = files.entry.load_model(
            str(files.directory),
            files.model_config,
            parallel,
            dtype,
            backend=attention_backends.ATTENTION_BACKENDS[backend_name](),
            kernels=kernel_table.KERNELS[kernel_table.choose(device, dtype)](),
            shards_tokens=choice.shards_tokens(config.moe_comm),
            expert_map=ExpertMap.of(config, files.model_config.n_routed_experts, files.model_config.moe_layers),
            counts_experts=config.expert_load,
            dummy_seed=config.seed if config.load_format == "dummy" else None,
        )
    except (CheckpointError, ConfigError):
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return model


def _dispatch_limits(config: EngineConfig, files: ModelFiles) -> DispatchLimits:
    model = files.model_config
    return DispatchLimits(
        num_experts=model.n_routed_experts,
        width=model.hidden_size,
        top_k=model.num_experts_per_tok,
        max_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        dtype=getattr(torch, config.dtype),
    )
