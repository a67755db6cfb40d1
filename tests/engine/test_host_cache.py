"""Cold blocks on the host: which are kept, that what comes back is what was taken, and that no answer changes."""

from __future__ import annotations

import random

import pytest
import torch

import engine.scheduler
from engine.config import ConfigError, EngineConfig
from engine.core import EngineCore
from engine.host_blocks import HostBlocks
from engine.host_cache import HostCache
from engine.launch import start_engine
from engine.sampling_params import SamplingParams
from engine.scheduler import GuessPlan
from tests.answers import ask
from tests.blocks import set_block_size
from tests.checkpoints import SMALL, build_checkpoint
from tests.drafts import DraftShape, write_draft
from tests.scheduler_model import ScheduledWorld

BLOCK = 8
SHAPE = DraftShape("llama", SMALL.hidden_size, SMALL.vocab_size, 64, num_heads=4, num_kv_heads=2, head_dim=16)
A, B, C, D = (name.encode() for name in "abcd")


def filled(num_slots: int, *digests: bytes) -> HostCache:
    """Each saved from the block of its place, 1, 2, ..., and the copies made."""
    host = HostCache(num_slots)
    for block, digest in enumerate(digests, start=1):
        host.save(block, digest)
    host.take_copies()
    return host


# which are kept


def test_the_least_recently_used_goes_first():
    host = filled(2, A, B)
    assert host.find([A]) == [0]
    host.take_copies()
    host.save(9, C)
    assert host.take_copies() == ([(9, 1)], []) and len(host) == 2
    assert host.find([B]) == [] and host.find([A]) == [0] and host.find([C]) == [1]


def test_only_a_beginning_is_found():
    assert filled(5, A, C).find([A, B, C]) == [0]


def test_what_is_there_is_not_copied_again():
    host = filled(2, A, B)
    host.save(7, A)
    assert host.take_copies() == ([], [])
    host.save(8, C)
    assert host.find([B]) == [] and host.find([A]) == [0], "it counts as used"


def test_a_slot_that_is_to_be_read_keeps_its_content_until_the_step_has_begun():
    host = filled(1, A)
    (slot,) = host.find([A])
    host.restore(slot, 4)
    host.save(6, B)
    assert host.take_copies() == ([], [(slot, 4)]), "there was no room for another"
    host.save(6, B)
    assert host.take_copies() == ([(6, slot)], [])


def test_a_block_evicted_before_anything_came_there_is_not_saved():
    host = filled(2, A)
    (slot,) = host.find([A])
    host.restore(slot, 4)
    host.save(4, A)
    assert host.take_copies() == ([], []) and host.find([A]) == [slot]


def test_a_save_that_loses_its_slot_is_not_made():
    host = HostCache(1)
    host.save(1, A)
    host.save(2, B)
    assert host.take_copies() == ([(2, 0)], []) and host.find([A]) == []


def test_content_saved_and_wanted_in_the_same_step_goes_there_and_back():
    host = HostCache(1)
    host.save(1, A)
    host.restore(host.find([A])[0], 5)
    assert host.take_copies() == ([(1, 0)], [(0, 5)])


def test_after_a_flush_nothing_is_found_but_what_was_promised_comes():
    host = filled(3, A, B)
    (slot,) = host.find([A])
    host.restore(slot, 4)
    host.save(6, C)
    host.clear()
    assert len(host) == 0 and host.find([A]) == host.find([C]) == []
    assert host.take_copies() == ([], [(slot, 4)])
    for block, digest in enumerate((A, B, C)):
        host.save(block, digest)
    assert len(host.take_copies()[0]) == len(host) == 3, "all slots are free again"


# what a scheduler makes of it


def visits(host_blocks: int, names: str) -> tuple[ScheduledWorld, list[int]]:
    """Prompts of 24 tokens, one letter each, one after another where 9 blocks of 4 are; what each found."""
    world, found = ScheduledWorld(10, 4, 4, 64, lookahead=0, host_blocks=host_blocks), []
    for index, letter in enumerate(names):
        name = f"{letter}{index}"
        world.add(name, 24, 4, shared=24, cache_salt=letter)
        request = world.scheduler.get(name)
        world.drain()
        found.append(request.num_cached_tokens)
    return world, found


def test_a_prompt_that_was_evicted_is_brought_back():
    _, without = visits(0, "aba")
    world, found = visits(20, "aba")
    assert without == [0, 0, 8] and found == [0, 0, 20], "all full blocks but the last, of which a token is computed"
    assert world.scheduler.kv_cache.host.num_restored == 3
    assert visits(20, "abcabc")[1][3:] == [20, 20, 20]


def test_each_slot_keeps_a_block_that_continues_what_the_device_has():
    assert [visits(slots, "aba")[1][-1] for slots in range(5)] == [8, 12, 16, 20, 20]


def test_what_comes_back_beside_decodes_comes_in_parts(monkeypatch):
    """Of a prompt of 8 full blocks the device has lost 6, or 5. While another request decodes two come in each step,
    and with the last of them it is admitted; where nobody decodes all come at once."""
    monkeypatch.setattr(engine.scheduler, "MOST_RESTORED", 2)
    for beside, parts in ((True, [2, 2, 2]), (False, [5])):
        world = ScheduledWorld(24, 4, 4, 64, lookahead=0, host_blocks=40)
        world.add("first", 36, 1, shared=36)
        world.drain()
        world.add("other", 80, 1)  # pushes it out
        world.drain()
        if beside:
            world.add("decoding", 2, 40)
            world.step()
        world.add("again", 36, 1, shared=36)
        request, restored = world.scheduler.get("again"), []
        while not request.finished:
            restored.append(len(world.step().restores))
        assert sum(restored) == 8 - 3 * beside - 3 * (not beside) or restored
        assert restored == parts and request.num_cached_tokens == 32
        world.drain()


@pytest.mark.parametrize("seed", range(6))
def test_what_comes_back_is_what_was_taken(seed, monkeypatch):
    """Random traffic with guesses, steps ahead, aborts, preemptions and flushes: each step reads what its requests' own
    tokens would have left in both caches."""
    rng = random.Random(seed)
    monkeypatch.setattr(engine.scheduler, "MOST_RESTORED", rng.choice([1, 2, 64]))
    lookahead = seed % 2
    world = ScheduledWorld(
        rng.randint(6, 20), rng.choice([1, 2, 4]), 5, rng.choice([5, 16, 33]), lookahead=lookahead,
        host_blocks=rng.choice([3, 9, 60]),
    )  # fmt: skip
    for step in range(500):
        while len(world.scheduler.waiting) < 4 and rng.random() < 0.4:
            length = rng.randint(1, min(world.max_tokens, 30))
            most = min(world.max_tokens - length + 1, 9)
            world.add(f"r{len(world.arrivals)}", length, rng.randint(1, most), rng.choice([0, length, length // 2]),
                      cache_salt=rng.choice("ab"))  # fmt: skip
        if world.scheduler.has_unfinished and rng.random() < 0.05:
            world.end(rng.choice(sorted(world.scheduler._requests)))
        if step % 200 == 199:
            world.flush()
        world.step(GuessPlan(rng.randint(0, 3), rng.randint(0, 3)), ahead=rng.random() < 0.7)
    world.drain()
    assert world.scheduler.kv_cache.host.num_restored > 20


# the copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_blocks_come_back_as_they_were(dtype, monkeypatch):
    """Of a cache whose blocks lie apart, and of one whose do not; more than are gathered at once, in several chunks."""
    monkeypatch.setattr(engine.host_blocks, "_CHUNK_BYTES", 500)
    layers = (torch.rand(3, 30, 4, 5) * 200).to(dtype)
    single = torch.rand(30, 4, 2)
    before = layers.clone(), single.clone()
    host = HostBlocks(40, [((3, 4, 5), dtype), ((4, 2), torch.float32)], torch.device("cpu"))
    caches = [layers.transpose(0, 1), single]
    blocks = random.Random(0).sample(range(30), 19)
    slots = random.Random(1).sample(range(40), 19)
    host.copy(list(zip(blocks, slots, strict=True)), [], caches)
    layers.zero_()
    single.zero_()
    host.copy([], list(zip(slots, blocks, strict=True)), caches)
    assert torch.equal(layers[:, blocks], before[0][:, blocks]) and torch.equal(single[blocks], before[1][blocks])
    others = sorted(set(range(30)) - set(blocks))
    assert not layers[:, others].any() and not single[others].any()


def test_saves_come_before_restores():
    cache = torch.arange(4.0).unsqueeze(1)
    host = HostBlocks(2, [((1,), torch.float32)], torch.device("cpu"))
    host.copy([(1, 0)], [], [cache])
    host.copy([(2, 1)], [(0, 2), (1, 3)], [cache])
    assert cache.flatten().tolist() == [0.0, 1.0, 1.0, 2.0]


# a model


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        set_block_size(patch, BLOCK)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("host"), SMALL)


def build(checkpoint, host_gb: float, num_blocks: int = 14, **settings) -> EngineCore:
    """Of its blocks all but `num_blocks` are taken away."""
    config = EngineConfig(
        str(checkpoint), device="cpu", dtype="float32", num_threads=1, max_num_seqs=3, max_num_batched_tokens=32,
        max_model_len=112, kv_cache_memory_gb=0.01, kv_offload_gb=host_gb, **settings,
    )  # fmt: skip
    core = start_engine(config)[0]
    pool = core.replica.scheduler.kv_cache.pool
    pool.take(pool.num_free - num_blocks)
    return core


def words(length: int, seed: int) -> list[int]:
    return [(17 * i * (seed + 3) + 5 * seed) % 290 for i in range(length)]


@pytest.mark.parametrize(("kv_cache_dtype", "with_draft"), [("auto", True), ("fp8", False)])
def test_an_answer_from_restored_blocks_is_that_of_a_cold_run(checkpoint, tmp_path, with_draft, kv_cache_dtype):
    """Three prompts in turns where the device holds one and a half, as cold, as restored: word for word, score for
    score."""
    settings = {"kv_cache_dtype": kv_cache_dtype}
    if with_draft:
        settings["draft"] = str(write_draft(tmp_path / "draft", SHAPE, seed=3, layer_ids=(0, 1, 2)))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    core, cold = build(checkpoint, 0.01, **settings), build(checkpoint, 0.0, **settings)
    cached = []
    for turn in range(2):
        for seed in range(3):
            prompt = words(45 + 8 * turn, seed)
            answer = ask(core, (prompt, params))[0]
            cold.flush_prefix_cache()
            expected = ask(cold, (prompt, params))[0]
            assert answer.token_ids == expected.token_ids
            values, others = ([[p.logprob for p in row.values()] for row in a.logprobs] for a in (answer, expected))
            torch.testing.assert_close(values, others, rtol=1e-4, atol=1e-5)
            cached.append(answer.metrics.num_cached_tokens)
    assert cached[:3] == [0, 0, 0] and min(cached[3:]) >= 32, "each came back"
    assert core.replica.scheduler.kv_cache.host.num_restored >= 8
    assert core.replica.runner.num_host_blocks > 100 and cold.replica.runner.num_host_blocks == 0


def test_settings_that_cannot_work_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="turn enable_prefix_caching on"):
        EngineConfig(kv_offload_gb=1.0, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="holds no block of"):
        build(checkpoint, 1e-9)
