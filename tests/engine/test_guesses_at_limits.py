"""Guesses where something runs out: blocks, the token budget, the context, the answer; eager and one step ahead."""

from __future__ import annotations

import random

import pytest

import engine.cache_plan
import engine.model_runner
import engine.rehearsal
import engine.replica
from engine.core import EngineCore
from engine.sampling_params import SamplingParams
from tests.answers import ask
from tests.checkpoints import SMALL, build_checkpoint
from tests.scripted_drafts import ScriptedDrafter, build, right, teach

BLOCK = 8
BLOCK_BYTES = 4 * BLOCK * (SMALL.num_hidden_layers * (SMALL.kv_lora_rank + SMALL.qk_rope_head_dim) + 1)
END = 256 + SMALL.num_merges + 1
K = 4
SHAPED = [
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1.4},
    {"min_tokens": 18, "ignore_eos": False, "logit_bias": {END: 9.0}},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("limits"), SMALL)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(300) for _ in range(length)]


def params_of(changes: dict, **more) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 30, "ignore_eos": True} | changes | more))


def tokens_of(core: EngineCore, requests: list, expected: list) -> list[list[int]]:
    teach(core, requests, expected, right)
    return [answer.token_ids for answer in ask(core, *requests)]


@pytest.mark.parametrize("kind", ["eager", "ahead"])
@pytest.mark.parametrize("changes", SHAPED, ids=lambda c: next(iter(c)))
def test_shaped_logits_where_fewer_guesses_are_planned_than_a_graph_verifies(checkpoint, kind, changes):
    """A request that waits leaves the others less of the budget."""
    settings = {"max_model_len": 160, "max_num_seqs": 2, "max_num_batched_tokens": 10}
    plain = build(checkpoint, None, **settings)
    requests = [(prompt_of(6, seed), params_of(changes)) for seed in range(3)]
    expected = ask(plain, *requests)
    core = build(checkpoint, K, kind == "ahead", **settings)
    assert tokens_of(core, requests, expected) == [answer.token_ids for answer in expected]


@pytest.mark.parametrize("kind", ["eager", "ahead"])
@pytest.mark.parametrize("changes", [SHAPED[0], SHAPED[2]], ids=lambda c: next(iter(c)))
def test_shaped_logits_in_steps_that_preempt(checkpoint, monkeypatch, kind, changes):
    for module in (engine.cache_plan, engine.model_runner, engine.rehearsal, engine.replica):
        monkeypatch.setattr(module, "BLOCK_SIZE", BLOCK)
    plain = build(checkpoint, None, max_model_len=160, max_num_seqs=5)
    core = build(checkpoint, K, kind == "ahead", kv_cache_memory_gb=9.5 * BLOCK_BYTES / 2**30, max_num_seqs=4)
    for seed in range(4):
        prompts = [prompt_of(3 + (5 * i + seed) % 11, 10 * seed + i) for i in range(4)]
        requests = [(prompt, params_of(changes, max_tokens=32)) for prompt in prompts]
        expected = ask(plain, *requests)
        assert tokens_of(core, requests, expected) == [answer.token_ids for answer in expected]
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize(("num_guesses", "context"), [(3, 49), (5, 51), (7, 49), (15, 33)])
def test_a_chain_reads_within_the_table_up_to_the_end_of_the_context(checkpoint, monkeypatch, num_guesses, context):
    plain = build(checkpoint, None, max_model_len=160, max_num_seqs=1)
    core = build(checkpoint, num_guesses, True, max_model_len=context, max_num_seqs=1)
    guess, reads = ScriptedDrafter._guess, []

    def noting(drafter, n, batch, cache):
        reads.append((int(batch.seq_lens_N[n]), batch.block_table_NB.shape[1] * cache.shape[1]))
        return guess(drafter, n, batch, cache)

    monkeypatch.setattr(ScriptedDrafter, "_guess", noting)
    for length in range(1, 17, 3):
        request = (prompt_of(length), params_of({}, max_tokens=None))
        text = ask(plain, request)[0].token_ids
        core.drafter.texts, core.drafter.script = [[*request[0], *text]], right
        found = ask(core, request)[0].token_ids
        assert found == text[: len(found)] and len(found) == context - length
    assert all(length <= room for length, room in reads) and max(length for length, _ in reads) > context


@pytest.mark.parametrize("kind", ["eager", "ahead"])
def test_guesses_behind_a_stop_string_do_not_count_as_accepted(checkpoint, kind):
    plain = build(checkpoint, None, max_model_len=160)
    core = build(checkpoint, K, kind == "ahead", max_model_len=160)
    request = (prompt_of(7), params_of({}, max_tokens=20))
    whole = ask(plain, request)[0]
    for at in range(1, 8):
        stopped = (request[0], params_of({}, max_tokens=20, stop=whole.text[at : at + 3]))
        core.drafter.texts, core.drafter.script = [[*request[0], *whole.token_ids]], right
        answer = ask(core, stopped)[0]
        assert answer.metrics.num_accepted_tokens < len(answer.token_ids), "the first token was no guess"
