"""The engine on one rank with a random model: answers do not depend on company, chunks, or memory; nothing leaks."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineDeadError, InvalidRequestError
from engine.launch import start_engine
from engine.sampling_params import SamplingParams
from tests.answers import Answer, ask, drain
from tests.blocks import set_block_size
from tests.checkpoints import SMALL, build_checkpoint

BLOCK = 8
CHUNK = 12
BLOCK_BYTES = 4 * SMALL.num_hidden_layers * BLOCK * (SMALL.kv_lora_rank + SMALL.qk_rope_head_dim)
EOS = 256 + SMALL.num_merges + 1


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of 8 tokens, so that short requests cross many."""
    with pytest.MonkeyPatch.context() as patch:
        set_block_size(patch, BLOCK)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("core"), SMALL)


def build(checkpoint, num_blocks: int | None = None, **settings) -> EngineCore:
    if num_blocks is not None:
        settings["kv_cache_memory_gb"] = (num_blocks + 0.5) * BLOCK_BYTES / 2**30
    config = EngineConfig(str(checkpoint), device="cpu", dtype="float32", num_threads=1, **settings)
    return start_engine(config)[0]


@pytest.fixture(scope="module")
def roomy(checkpoint) -> EngineCore:
    """Whole prompts in one step, no preemption: the cold run that others are compared with."""
    return build(checkpoint, max_model_len=512)


@pytest.fixture(scope="module")
def tight(checkpoint) -> EngineCore:
    """Prompts in chunks, and so little memory that requests push each other out. The last block is the spare one."""
    return build(checkpoint, 20, max_num_seqs=5, max_num_batched_tokens=CHUNK)


@pytest.fixture(autouse=True)
def nothing_left(request):
    """After each test the engines it used are empty."""
    yield
    for name in {"roomy", "tight"} & set(request.fixturenames):
        core = request.getfixturevalue(name)
        assert not core.has_unfinished() and core.unfinished_ids() == []
        stats = core.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(300) for _ in range(length)]


def greedy(max_tokens: int = 8, **changes) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


def drawn(seed: int, max_tokens: int = 10, **changes) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **changes)


def mixed_requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    shared = prompt_of(10, 99)
    found = []
    for i in range(count):
        prompt = (shared if i % 3 == 0 else []) + prompt_of(rng.randint(1, 50), i)
        changes = rng.choice([{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"repetition_penalty": 1.3}])
        length = rng.randint(1, 40)
        found.append((prompt, greedy(length) if i % 2 else drawn(rng.getrandbits(63), length, **changes)))
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_an_answer_is_the_same_alone_and_among_many_with_chunks_and_preemption(roomy, tight, seed):
    requests = mixed_requests(16, seed)
    alone = [ask(roomy, r)[0] for r in requests]
    before = tight.stats().num_preemptions
    together = ask(tight, *requests)
    assert tight.stats().num_preemptions > before
    for (_, params), one, other in zip(requests, alone, together, strict=True):
        assert other.token_ids == one.token_ids and other.text == one.text
        assert len(one.token_ids) == params.max_tokens and one.end == other.end == ("length", None)


def test_greedy_answers_do_not_change_between_runs_or_with_company(roomy):
    target = (prompt_of(20), greedy(20))
    first = ask(roomy, target)[0].token_ids
    for company in (0, 0, 1, 7, 16):
        others = [(prompt_of(5 + i, i), drawn(i, 12)) for i in range(company)]
        assert ask(roomy, target, *others)[0].token_ids == first


def test_one_seed_gives_one_text(roomy):
    def run(seed: int, company: int = 0) -> str:
        others = [(prompt_of(9, i), drawn(100 + i)) for i in range(company)]
        return ask(roomy, (prompt_of(5), drawn(seed, 16)), *others)[0].text

    assert run(7) == run(7) == run(7, 8) != run(8)


def test_no_seed_gives_another_text_each_time(roomy):
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    assert ask(roomy, (prompt_of(5), params))[0].token_ids != ask(roomy, (prompt_of(5), params))[0].token_ids


@pytest.mark.parametrize("seed", [5, -1, 2**63 - 2, -(2**63)])
def test_n_answers_are_those_of_following_seeds(roomy, seed):
    """At the edge of 64 bits the seeds go on at the other end."""
    roomy.add_request("many", prompt_of(6), drawn(seed, 6, n=4))
    answers = drain(roomy)
    assert [key for key in sorted(answers)] == [("many", i) for i in range(4)]
    texts = [answers["many", i].token_ids for i in range(4)]
    assert len({tuple(t) for t in texts}) == 4
    seeds = [seed + i if seed + i < 2**63 else seed + i - 2**64 for i in range(4)]
    assert texts == [ask(roomy, (prompt_of(6), drawn(s, 6)))[0].token_ids for s in seeds]


def test_prompt_logprobs_in_chunks_and_after_preemption(roomy, tight):
    prompts = [prompt_of(n, n) for n in (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3, 61)]
    requests = [(p, greedy(30, prompt_logprobs=3)) for p in prompts]
    before = tight.stats().num_preemptions
    together = ask(tight, *requests)
    assert tight.stats().num_preemptions > before
    for request, got in zip(requests, together, strict=True):
        prompt, (alone,) = request[0], ask(roomy, request)
        assert len(got.prompt_logprobs) == len(prompt) and got.prompt_logprobs[0] is None
        for token, ours, theirs in zip(prompt[1:], got.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
            assert next(iter(ours)) == token and set(ours) == set(theirs) and len(ours) in (3, 4)
            assert all(ours[t].logprob == pytest.approx(theirs[t].logprob, abs=2e-4) for t in ours)
        plain = ask(roomy, (prompt, greedy(30)))[0]
        assert plain.token_ids == got.token_ids and plain.prompt_logprobs is None


def test_prompt_logprobs_come_once_for_n_answers(roomy):
    roomy.add_request("r", prompt_of(5), drawn(1, 3, n=2, prompt_logprobs=0))
    answers = drain(roomy)
    assert len(answers["r", 0].prompt_logprobs) == 5 and answers["r", 1].prompt_logprobs is None


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_chunked_prompts_end_in_the_same_logits(roomy, tight, length):
    """B122."""
    one, other = (ask(core, (prompt_of(length), greedy(2, logprobs=20)))[0] for core in (roomy, tight))
    for ours, theirs in zip(other.logprobs, one.logprobs, strict=True):
        assert list(ours) == list(theirs)
        assert all(ours[t].logprob == pytest.approx(theirs[t].logprob, abs=2e-4) for t in ours)


def test_each_position_has_its_own_top_logprobs(roomy):
    answer = ask(roomy, (prompt_of(4), greedy(10, logprobs=20)))[0]
    assert len(answer.logprobs) == 10 and len({tuple(row) for row in answer.logprobs}) > 1
    for token, row in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(row)) == token and row[token].rank == 1 and len(row) == 20
        assert [r.logprob for r in row.values()] == sorted((r.logprob for r in row.values()), reverse=True)
    sampled = ask(roomy, (prompt_of(4), drawn(3, 10, logprobs=0)))[0]
    assert [list(row) for row in sampled.logprobs] == [[t] for t in sampled.token_ids]


def test_logprobs_are_those_before_bias_and_temperature(roomy):
    best = ask(roomy, (prompt_of(4), greedy(1, logprobs=1)))[0].logprobs[0]
    token = next(iter(best))
    banned = ask(roomy, (prompt_of(4), greedy(1, logprobs=1, logit_bias={token: -100})))[0]
    assert banned.token_ids != [token] and banned.logprobs[0][token] == best[token]


def test_a_stop_string_ends_and_frees(roomy):
    text = ask(roomy, (prompt_of(7), greedy(30)))[0].text
    stop = text[4:7]
    answer = ask(roomy, (prompt_of(7), greedy(30, stop=stop)))[0]
    assert answer.text == text[: text.index(stop)] and answer.end == ("stop", stop)
    assert len(answer.token_ids) < 30


def test_exact_counts(roomy):
    eos_wins = {"logit_bias": {EOS: 100}}
    for count in range(1, 7):
        assert len(ask(roomy, (prompt_of(3), greedy(count)))[0].token_ids) == count
        forced = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=count, **eos_wins)
        answer = ask(roomy, (prompt_of(3), forced))[0]
        assert EOS not in answer.token_ids[:-1] and answer.token_ids[-1] == EOS
        assert len(answer.token_ids) == count + 1 and answer.end == ("stop", None)
    assert ask(roomy, (prompt_of(3), SamplingParams(**eos_wins)))[0].token_ids == [EOS]
    ignored = ask(roomy, (prompt_of(3), greedy(6, **eos_wins)))[0]
    assert ignored.token_ids == [EOS] * 6 and ignored.end == ("length", None) and ignored.text == ""
    named = ask(roomy, (prompt_of(3), greedy(6, stop_token_ids=[EOS], **eos_wins)))[0]
    assert named.token_ids == [EOS] and named.end == ("stop", EOS)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 8])
def test_abort_frees_everything_and_leaves_nothing_to_the_next(roomy, tight, steps):
    """Aborted while queued, waiting, prefilling and decoding; the next answers equal their cold runs."""
    cold = [ask(roomy, (prompt_of(30, i), greedy(6)))[0].token_ids for i in range(3)]
    for _ in range(3):
        for i in range(8):
            tight.add_request(f"gone{i}", prompt_of(40, 50 + i), greedy(60, n=1 + i % 2))
        answers = defaultdict(Answer)
        for _ in range(steps):
            for delta in tight.step():
                answers[delta.request_id, delta.index].take(delta)
        for i in range(8):
            tight.abort_request(f"gone{i}")
            tight.abort_request(f"gone{i}")
        tight.abort_request("never seen")
        assert tight.unfinished_ids() == []
        drain(tight, answers)
        assert len(answers) == 12 and {a.end for a in answers.values()} == {("abort", None)}
        assert tight.stats().kv_cache_usage == 0.0
        assert [a.token_ids for a in ask(tight, *[(prompt_of(30, i), greedy(6)) for i in range(3)])] == cold


def test_a_stranger_in_the_middle_is_aborted_and_the_others_go_on(roomy, tight):
    cold = [ask(roomy, (prompt_of(20, i), greedy(12)))[0].token_ids for i in range(3)]
    for i in range(3):
        tight.add_request(f"stay{i}", prompt_of(20, i), greedy(12))
        tight.add_request(f"go{i}", prompt_of(33, 70 + i), drawn(i, 50))
    answers = defaultdict(Answer)
    for i in range(9):
        for delta in tight.step():
            answers[delta.request_id, delta.index].take(delta)
        if i % 3 == 2:
            tight.abort_request(f"go{i // 3}")
    drain(tight, answers)
    assert [answers[f"stay{i}", 0].token_ids for i in range(3)] == cold


def test_an_id_may_be_used_again_at_once(roomy):
    """After an abort, running or still queued, and after a stop string that the scheduler has yet to hear of."""
    expected = ask(roomy, (prompt_of(5), greedy(4)))[0].token_ids
    for steps in (0, 1, 2):
        roomy.add_request("same", prompt_of(9), greedy(50))
        for _ in range(steps):
            roomy.step()
        roomy.abort_request("same")
        roomy.add_request("same", prompt_of(5), greedy(4))
        seen = [d for _ in range(8) for d in roomy.step()]
        assert [t for d in seen for t in d.token_ids] == expected
        assert [d.finish_reason for d in seen if d.finish_reason] == ["abort", "length"]
    text = ask(roomy, (prompt_of(7), greedy(30)))[0].text
    roomy.add_request("same", prompt_of(7), greedy(30, stop=text[3:6]))
    while not any(d.finish_reason for d in roomy.step()):
        pass
    roomy.add_request("same", prompt_of(5), greedy(4))
    assert drain(roomy)["same", 0].token_ids == expected


def test_ids_in_use_are_refused_and_harm_no_one(roomy):
    roomy.add_request("a", prompt_of(3), greedy(3))
    roomy.add_request("b#1", prompt_of(3), greedy(3))
    for name, params in (("a", greedy()), ("a", greedy(n=2)), ("b", drawn(1, n=2))):
        with pytest.raises(ValueError, match=name):
            roomy.add_request(name, prompt_of(3), params)
    assert sorted(drain(roomy)) == [("a", 0), ("b#1", 0)]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([], "prompt"), ([-1], "prompt"), ([10**6], "prompt"), ([1.5], "prompt"), (["a"], "prompt"), ([None], "prompt")],
)
def test_prompts_that_are_none_are_refused(roomy, prompt, param):
    with pytest.raises(InvalidRequestError) as caught:
        roomy.add_request("r", prompt, greedy())
    assert caught.value.param == param and str(caught.value).endswith(".")


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, lambda ids: [np.int64(t) for t in ids]])
def test_arrays_of_ids_become_plain_integers(roomy, kind):
    """Other ranks read them as JSON."""
    expected = ask(roomy, (prompt_of(5), greedy(4)))[0].token_ids
    roomy.add_request("r", kind(prompt_of(5)), greedy(4))
    assert {type(t) for t in roomy._new[0].to_dict()["prompt_token_ids"]} == {int}
    assert drain(roomy)["r", 0].token_ids == expected


def test_a_request_that_never_fits_is_refused_and_ten_small_ones_finish(tight):
    """B110."""
    assert tight.max_model_len == 19 * BLOCK
    with pytest.raises(InvalidRequestError) as caught:
        tight.add_request("big", prompt_of(tight.max_model_len), greedy(1))
    assert caught.value.code == "context_length_exceeded"
    answers = ask(tight, *[(prompt_of(5, i), greedy(5)) for i in range(10)])
    assert all(a.end == ("length", None) for a in answers)


def test_an_output_that_outgrows_the_pool_ends_at_its_length(tight):
    """B114."""
    for length in (1, 100, tight.max_model_len - 1):
        answer = ask(tight, (prompt_of(length), greedy(None)))[0]
        assert len(answer.token_ids) == tight.max_model_len - length and answer.end == ("length", None)


def test_one_short_prompt_with_a_long_answer_then_the_whole_pool(checkpoint, roomy):
    """B116."""
    core = build(checkpoint, 32, max_num_seqs=4, max_num_batched_tokens=4)
    cold = ask(roomy, (prompt_of(3), greedy(200)))[0].token_ids
    assert ask(core, (prompt_of(3), greedy(200)))[0].token_ids == cold
    requests = [(prompt_of(50, i), greedy(10)) for i in range(6)]
    expected = [ask(roomy, r)[0].token_ids for r in requests]
    assert [a.token_ids for a in ask(core, *requests)] == expected
    assert core.stats().kv_cache_usage == 0.0


def test_the_first_failure_ends_the_engine_with_its_reason(checkpoint):
    core = build(checkpoint, 20)
    core.add_request("r", prompt_of(5), greedy(5))
    core.replica.runner.execute = lambda output: 1 / 0
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            core.step()
    assert "ZeroDivisionError" in core.failure


def test_tokens_of_a_step_that_waited_in_vain_are_not_shown(checkpoint):
    core = build(checkpoint, 20)
    core.add_request("r", prompt_of(5), greedy(5))
    core.replica.runner.failure = lambda: "rows of rank 3 did not arrive within 15 s"
    with pytest.raises(EngineDeadError, match="rows of rank 3"):
        core.step()


class Control:
    """The other ranks, as far as a step needs them."""

    failure = None

    def begin_step(self, message):
        pass

    def end_step(self, digest):
        pass

    def fail(self, reason):
        self.failure = reason


@pytest.mark.parametrize("control", [None, Control()])
def test_an_interrupted_step_can_be_repeated_alone_but_not_with_other_ranks(checkpoint, roomy, control):
    """Other ranks may have computed what this one has not."""
    core = build(checkpoint, 20)
    core._control = control
    core.add_request("r", prompt_of(5), greedy(5))
    core.step()
    execute = core.replica.runner.execute

    def interrupted(output):
        raise KeyboardInterrupt

    core.replica.runner.execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.replica.runner.execute = execute
    if control is None:
        tokens = drain(core)["r", 0].token_ids
        assert tokens == ask(roomy, (prompt_of(5), greedy(5)))[0].token_ids[1:]
    else:
        with pytest.raises(EngineDeadError, match="interrupted"):
            core.step()


def test_stats_count(checkpoint):
    core = build(checkpoint, 20, max_num_seqs=2)
    for i in range(3):
        core.add_request(f"r{i}", prompt_of(9, i), greedy(4))
    assert core.stats().num_waiting == 3
    core.step()
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1) and 0 < stats.kv_cache_usage < 1
    drain(core)
    stats = core.stats()
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (27, 12)
