"""What is left for the KV cache: measured in the right order, summed up, the same on all ranks, said when it is not
enough."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from engine import cache_plan, memory, model_loading, rehearsal
from engine.cache_plan import GIB, MemoryUse
from engine.config import FULL_CONFIG, ConfigError, EngineConfig
from engine.launch import start_engine
from engine.model_files import ModelFiles
from engine.model_runner import ModelRunner
from engine.sampling_params import MAX_LOGPROBS
from tests.checkpoints import SMALL, build_checkpoint
from tests.drafts import DraftShape, write_draft
from tests.gloo_ranks import on_ranks
from tests.rerun import DeviceLengths, RerunRecorder

SEQS, TOKENS, LONGEST = 5, 24, 160
WIDTHS = {"kv_lora_rank": 32, "nope": 16, "rope": 8, "value": 16, "num_heads": 4, "q_lora_rank": 32}
SMALL_DRAFT = DraftShape("mla", SMALL.hidden_size, SMALL.vocab_size, 64, **WIDTHS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("memory"), SMALL)


def config_of(checkpoint, **settings) -> EngineConfig:
    shape = {"max_num_seqs": SEQS, "max_num_batched_tokens": TOKENS, "max_model_len": LONGEST}
    return EngineConfig(str(checkpoint), device="cpu", dtype="float32", num_threads=1, **(shape | settings))


@pytest.fixture(scope="module")
def runner(checkpoint) -> ModelRunner:
    runner = start_engine(config_of(checkpoint))[0].replica.runner
    runner.model.backend = DeviceLengths()
    return runner


class FakeGauge:
    """A GPU of `total` bytes on which the n-th step takes peaks[n]; `recorder` knows what graphs take. Notes what it is
    asked, and what the runner holds at that time."""

    def __init__(self, runner, peaks: list[int], recorder: RerunRecorder, total: int = 1000 * GIB):
        self.total, self.runner, self.peaks, self.recorder = total, runner, list(peaks), recorder
        self.asked: list[tuple] = []

    def tensors(self) -> int:
        return 70 * GIB

    def in_use(self) -> int:
        blocks = 0 if self.runner.caches is None else self.runner.caches.shape[1]
        self.asked.append(("in use", blocks, self.runner.graphs is not None))
        return 72 * GIB + blocks * GIB + self.recorder.memory()

    def peak(self, call) -> int:
        self.asked.append(("step", self.runner.caches.shape[1], self.runner.graphs is not None))
        call()
        return self.peaks.pop(0)


def measured(runner, peaks=(3, 9, 4, 5), graphs=(), with_graphs: bool = True, total: int = 1000 * GIB):
    recorder = RerunRecorder(graphs)
    gauge = FakeGauge(runner, [peak * GIB for peak in peaks], recorder, total)
    return memory.measure(runner, gauge, recorder if with_graphs else None), gauge, recorder


def test_each_part_of_the_sum_is_what_was_measured(runner):
    use, gauge, recorder = measured(runner, graphs=[7 * 2**20, 2**20])
    assert use == MemoryUse(
        total=1000 * GIB, weights=70 * GIB, other=2 * GIB, step=9 * GIB, graphs=8 * 2**20, margin=20 * GIB
    )
    assert use.available == (1000 - 70 - 2 - 9 - 20) * GIB - 8 * 2**20
    assert len(recorder.graphs) == 3 * 4 and not gauge.peaks, "of 1, 2, 4 and 5 requests; and every step was run"


def test_steps_come_before_the_trial_and_both_leave_nothing(runner):
    _, gauge, recorder = measured(runner, graphs=[GIB] * 3)
    kinds = [name for name, *_ in gauge.asked]
    assert kinds == ["in use"] + ["step"] * 4 + ["in use"] * 5
    assert [blocks for _, blocks, _ in gauge.asked] == [0] + [2] * 4 + [0, 2, 2, 0, 0], "never more than a tiny cache"
    assert [graphs for *_, graphs in gauge.asked] == [False] * 7 + [True, False, False]
    assert runner.caches is None and runner.graphs is None
    assert recorder.memory() == 0, "the trial's graphs are gone before the cache is there"


class AfterALoad(FakeGauge):
    """Loading has left 20 GiB to the allocator, which gives them back when it is told to."""

    idle = 20 * GIB

    def in_use(self) -> int:
        self.idle = 0
        return super().in_use()

    def peak(self, call) -> int:
        return super().peak(call) + self.idle


def test_b156_the_cache_is_sized_after_what_loading_left_idle_is_given_back(runner):
    recorder = RerunRecorder(())
    gauge = AfterALoad(runner, [peak * GIB for peak in (3, 9, 4, 5)], recorder)
    assert memory.measure(runner, gauge, None) == measured(runner, with_graphs=False)[0] and gauge.idle == 0


def test_nothing_is_captured_where_nothing_will_be(runner):
    use, _, recorder = measured(runner, with_graphs=False)
    assert use.graphs == 0 and recorder.graphs == []


def test_a_step_that_does_not_fit_is_named(runner):
    def too_large(call):
        raise torch.OutOfMemoryError("CUDA out of memory")

    gauge = FakeGauge(runner, [], RerunRecorder(), total=80 * GIB)
    gauge.peak = too_large
    with pytest.raises(ConfigError, match=r"a fresh prompt.*70.00 GiB of weights in 80.00 GiB.*max_num_batched_tokens"):
        memory.measure(runner, gauge, None)
    assert runner.caches is None


@pytest.mark.parametrize("guesses", [0, 3])
@pytest.mark.parametrize(("seqs", "most"), [(5, 24), (1, 24), (1, 1), (3, 3), (2, 5), (64, 2048)])
@pytest.mark.parametrize("longest", [3, 160, 4096])
def test_rehearsed_steps_reach_every_limit(guesses, seqs, most, longest):
    """As many tokens, requests and logits as a step may have, and never more."""
    runner = SimpleNamespace(
        config=SimpleNamespace(max_num_batched_tokens=most, max_model_len=longest), num_guesses=guesses,
        max_num_seqs=seqs, model_config=SimpleNamespace(max_position_embeddings=4096),
    )  # fmt: skip
    steps = dict(rehearsal.largest_steps(runner))
    assert len(steps) == 4
    for output in steps.values():
        items = output.scheduled
        assert 0 < output.num_tokens <= most and 0 < len(items) <= seqs
        assert all(item.samples and item.request.params.logprobs == MAX_LOGPROBS for item in items)
        assert max(item.start + item.num_rows for item in items) <= max(longest, 1 + guesses)
        assert sum(item.request.params.shapes_logits for item in items) == 1
    fresh, longest_prompt, decodes, burst = steps.values()
    room = max(longest - 1 - 2 * guesses, 1)
    assert fresh.scheduled[0].start == 0 and fresh.num_tokens == min(most, room) == longest_prompt.num_tokens
    assert longest_prompt.scheduled[0].stop == room
    assert len(burst.scheduled) == seqs
    assert len(decodes.scheduled) == min(seqs, max(most // (guesses + 1), 1))
    if most >= seqs * (1 + guesses):
        assert {item.num_guesses for item in decodes.scheduled} == {guesses}
    if room > most:
        assert burst.num_tokens == most
        assert max(item.num_guesses for item in burst.scheduled) == (min(guesses, most // seqs - 1) if seqs > 1 else 0)


def test_rehearsed_steps_run_with_a_draft(checkpoint, tmp_path):
    draft = write_draft(tmp_path / "draft", SMALL_DRAFT, layer_ids=(0, 1, 2))
    runner = start_engine(config_of(checkpoint, draft=str(draft), num_draft_tokens=3))[0].replica.runner
    runner.hold_caches(2)
    with torch.inference_mode():
        sampled = [len(runner.execute(output).read()) for _, output in rehearsal.largest_steps(runner)]
    assert sampled == [1, 1, 5, 5]


def use_of(available_gib: float) -> MemoryUse:
    return MemoryUse(100 * GIB, 60 * GIB, GIB, 2 * GIB, GIB, int((36 - available_gib) * GIB))


def settled(runner, use, **settings):
    config = config_of(runner.config.model, **settings)
    stand_in = SimpleNamespace(config=config, parallel=runner.parallel, model=runner.model, drafter=None)
    return memory.settle(stand_in, ModelFiles.read(config), use)


def test_the_cache_takes_what_is_left(runner, monkeypatch):
    monkeypatch.setattr(cache_plan, "known_bytes", lambda config: None)
    bytes_a_block = cache_plan.block_bytes(runner.config, ModelFiles.read(runner.config), runner.model)
    limits = settled(runner, use_of(7.5 * bytes_a_block / GIB))
    assert (limits.num_blocks, limits.num_tokens, limits.longest, limits.max_num_seqs) == (7, 6 * 64, LONGEST, SEQS)
    assert limits.cache_bytes == 7 * bytes_a_block
    assert limits.free_bytes == limits.memory.margin + limits.memory.available - limits.cache_bytes
    ample = settled(runner, use_of(10))
    assert ample.num_blocks == SEQS * 3 + 1, "no more than all requests at their longest could hold"
    words = ample.sentence()
    assert "960 tokens of KV cache, 5 requests at once, the longest 160 tokens; of 100.00 GiB: weights 60.00" in words
    assert "largest step 2.00, graphs 1.00, KV cache 0.00" in words and words.endswith("free 36.00")


@pytest.mark.parametrize("available", [-0.5, 0.0])
def test_what_does_not_fit_is_summed_up(runner, monkeypatch, available):
    monkeypatch.setattr(cache_plan, "known_bytes", lambda config: None)
    with pytest.raises(ConfigError) as refusal:
        settled(runner, use_of(available))
    words = str(refusal.value)
    assert "100.00 GiB of memory less 60.00 of weights, 1.00 in use besides, 2.00 for the largest step" in words
    assert f"leaves {available:.2f} GiB for the KV cache" in words and "use more ranks" in words


def test_a_longest_request_that_does_not_fit_is_refused_with_what_would(runner, monkeypatch):
    monkeypatch.setattr(cache_plan, "known_bytes", lambda config: None)
    bytes_a_block = cache_plan.block_bytes(runner.config, ModelFiles.read(runner.config), runner.model)
    with pytest.raises(ConfigError, match=r"lower max_model_len to 128 or use more ranks: 100.00 GiB"):
        settled(runner, use_of(3.5 * bytes_a_block / GIB))


def test_a_given_cache_has_to_fit_beside_the_rest(runner):
    assert settled(runner, use_of(0.5), kv_cache_memory_gb=0.4).memory.available == GIB // 2
    with pytest.raises(ConfigError, match=r"kv_cache_memory_gb asks for does not fit: 100.00 GiB .* lower it or leave"):
        settled(runner, use_of(-0.5), kv_cache_memory_gb=0.001)


def test_weights_that_no_gpu_holds_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(model_loading, "gpu_bytes", lambda: 4 * GIB)
    settings = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "hf_overrides": {"num_hidden_layers": 2}}
    share = EngineConfig(str(FULL_CONFIG), tp_share=8, **settings)
    model_loading.check_model(share, ModelFiles.read(share))
    larger = EngineConfig(str(FULL_CONFIG), tp_share=4, **settings)
    with pytest.raises(ConfigError, match=r"weights take [34]\.\d+ GiB, and its GPU has 4.00 GiB.* use more ranks"):
        model_loading.check_model(larger, ModelFiles.read(larger))


def settle_on_ranks(parallel, checkpoint: str):
    """Rank 1 has half as much left, or nothing."""
    config = config_of(checkpoint, tp=2)
    files = ModelFiles.read(config)
    model = SimpleNamespace(cache_width=40, latent_width=32)
    runner = SimpleNamespace(config=config, parallel=parallel, model=model, drafter=None)
    cache_plan.known_bytes = lambda config: None
    bytes_a_block = cache_plan.block_bytes(config, files, model)
    room = [12, 6][parallel.rank] * bytes_a_block
    found = memory.settle(runner, files, use_of(room / GIB)).num_blocks
    try:
        memory.settle(runner, files, use_of([10, -1][parallel.rank]))
    except ConfigError as error:
        return found, str(error)
    return found, None


def test_ranks_settle_on_what_the_smallest_can_hold(tmp_path, checkpoint):
    outcomes = on_ranks(2, tmp_path, settle_on_ranks, str(checkpoint))
    assert [blocks for blocks, _ in outcomes] == [6, 6]
    assert all("for the KV cache" in refusal for _, refusal in outcomes)


def test_an_engine_states_its_limits_at_start(checkpoint, caplog):
    with caplog.at_level(logging.INFO):
        core = start_engine(config_of(checkpoint))[0]
    limits = core.replica.runner.limits
    assert limits.memory is None and limits.free_bytes is None, "nothing is measured on a CPU"
    assert (limits.longest, limits.max_num_seqs) == (LONGEST, SEQS)
    assert limits.num_tokens == core.replica.scheduler.kv_cache.max_tokens
    assert limits.sentence() in caplog.text and f"{limits.num_tokens} tokens of KV cache" in caplog.text
