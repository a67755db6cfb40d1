"""Guesses change no answer: scripted drafts that are right, wrong, or say what they should not, against plain decoding.

Each step shape twice: eager, where the host knows the guesses, and replayed ahead of the tokens of the step before,
where the device alone knows how many of them were accepted.
"""

from __future__ import annotations

import random

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.sampling_params import SamplingParams
from engine.scheduler import GuessPlan
from engine.verify import NO_GUESS
from tests.answers import Answer, ask, drain
from tests.blocks import set_block_size
from tests.checkpoints import SMALL, build_checkpoint
from tests.drafts import DraftShape, write_draft
from tests.rank_cores import build_core, run_ranks
from tests.scripted_drafts import build, build_real, nothing, one_more_each_time, right, says, sometimes, teach, wrong

BLOCK = 8
BLOCK_BYTES = 4 * BLOCK * (SMALL.num_hidden_layers * (SMALL.kv_lora_rank + SMALL.qk_rope_head_dim) + 1)
EOS = 256 + SMALL.num_merges + 1
K = 4
SCRIPTS = {
    "right": right,
    "wrong": wrong,
    "sometimes": sometimes,
    "in turn": one_more_each_time,
    "nothing": nothing,
    "end first": says(EOS, 0),
    "end second": says(EOS, 1),
    "end third": says(EOS, 2),
    "none second": says(NO_GUESS, 1),
}
KINDS = ["eager", "ahead"]


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of 8 tokens, so that short requests and their guesses cross many."""
    with pytest.MonkeyPatch.context() as patch:
        set_block_size(patch, BLOCK)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("speculation"), SMALL)


@pytest.fixture(scope="module")
def plain(checkpoint) -> EngineCore:
    return build(checkpoint, None, max_model_len=160, max_num_seqs=5)


@pytest.fixture(scope="module", params=KINDS)
def guessing(request, checkpoint, plain) -> EngineCore:
    return build(checkpoint, K, request.param == "ahead", max_model_len=160, max_num_seqs=5)


@pytest.fixture(autouse=True)
def nothing_left(request):
    """After each test the engines it used are empty."""
    yield
    for name in {"plain", "guessing"} & set(request.fixturenames):
        core = request.getfixturevalue(name)
        assert not core.has_unfinished() and core.unfinished_ids() == []
        assert core.stats().kv_cache_usage == 0.0


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(300) for _ in range(length)]


def greedy(max_tokens: int = 12, **changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | changes)


def drawn(seed: int, max_tokens: int = 12, **changes) -> SamplingParams:
    return greedy(max_tokens, temperature=1.0, seed=seed, **changes)


def check_same(one: Answer, other: Answer) -> None:
    assert (one.token_ids, one.text, one.end) == (other.token_ids, other.text, other.end)
    check_rows(one.logprobs, other.logprobs)
    assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
    check_rows((one.prompt_logprobs or [None])[1:], (other.prompt_logprobs or [None])[1:])


def check_rows(some: list[dict], others: list[dict]) -> None:
    assert len(some) == len(others)
    for ours, theirs in zip(some, others, strict=True):
        assert list(ours)[:1] == list(theirs)[:1] and set(ours) == set(theirs)
        assert all(ours[t].logprob == pytest.approx(theirs[t].logprob, abs=2e-4) for t in ours)


def steps_of(core: EngineCore, *requests) -> tuple[list[Answer], int]:
    before = core.stats().num_steps
    answers = ask(core, *requests)
    return answers, core.stats().num_steps - before


def check(plain: EngineCore, guessing: EngineCore, requests: list, script=right) -> list[Answer]:
    """The same answers with guesses. Where these are right, all but the prompts' own steps are shorter."""
    expected = ask(plain, *requests)
    teach(guessing, requests, expected, script)
    found = ask(guessing, *requests)
    for one, other in zip(expected, found, strict=True):
        check_same(one, other)
        accepted, guessed = other.metrics.num_accepted_tokens, other.metrics.num_draft_tokens
        assert 0 <= accepted <= guessed and accepted < len(other.token_ids)
    if script is right and max(len(a.token_ids) for a in expected) > 4:
        assert any(a.metrics.num_accepted_tokens for a in found), "guesses are used"
    return found


MANY = [
    (prompt_of(5), greedy(17)),
    (prompt_of(9), drawn(3, 20)),
    (prompt_of(16, 1), drawn(4, 9, top_p=0.8)),
    (prompt_of(1, 2), greedy(11, logprobs=2)),
    (prompt_of(23, 3), drawn(5, 14, top_k=9, min_p=0.02)),
]


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_any_draft_gives_the_same_answers(plain, guessing, script):
    check(plain, guessing, MANY, script)
    assert guessing.drafter.num_known > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"frequency_penalty": -0.5, "min_p": 0.1},
        {"top_p": 0.7},
        {"min_p": 0.2, "top_k": 7},
        {"logit_bias": {3: 6.0, 40: -100.0, EOS: 4.0}},
        {"logprobs": 3},
        {"logprobs": 0, "repetition_penalty": 1.2},
        {"prompt_logprobs": 2, "logprobs": 1},
        {"min_tokens": 7, "ignore_eos": False, "logit_bias": {EOS: 9.0}},
        {"stop_token_ids": list(range(0, 300, 9))},
    ],
    ids=lambda c: "+".join(c),
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_parameter_means_the_same(plain, guessing, changes, temperature):
    params = [greedy(13, temperature=temperature, seed=s, **changes) for s in (1, 2)]
    requests = [(prompt_of(7), params[0]), (prompt_of(11, 1), params[1]), (prompt_of(8), greedy(15))]
    check(plain, guessing, requests, sometimes if temperature else right)


@pytest.mark.parametrize("count", range(1, 10))
def test_any_number_of_requests(plain, guessing, count):
    """More than fit at once, ends at any time, right guesses beside wrong ones."""
    lengths = [3 + 4 * i % 13 for i in range(count)]
    params = [greedy(length) if i % 2 else drawn(i, length) for i, length in enumerate(lengths)]
    requests = [(prompt_of(1 + 5 * i % 17, i), one) for i, one in enumerate(params)]
    check(plain, guessing, requests, one_more_each_time if count % 2 else right)


@pytest.mark.parametrize("script", ["right", "end first", "end second", "end third"])
@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_exact_counts_whatever_is_guessed(plain, guessing, max_tokens, script):
    """The budget, and the end token, inside a step of five."""
    for params in (
        greedy(max_tokens),
        greedy(max_tokens, logit_bias={EOS: 100}),
        greedy(max_tokens, ignore_eos=False, min_tokens=max_tokens // 2, logit_bias={EOS: 100}),
        greedy(max_tokens, ignore_eos=False, min_tokens=max_tokens, logit_bias={EOS: 100}),
    ):
        (answer,) = check(plain, guessing, [(prompt_of(6), params)], SCRIPTS[script])
        assert len(answer.token_ids) <= max_tokens
        forced = params.logit_bias is not None
        if forced and not params.ignore_eos:
            assert len(answer.token_ids) == min(params.min_tokens + 1, max_tokens)
            assert EOS not in answer.token_ids[: params.min_tokens] and EOS not in answer.token_ids[:-1]
        else:
            assert len(answer.token_ids) == max_tokens or answer.token_ids[-1] == EOS


def test_nothing_comes_after_an_end_that_was_guessed(plain, guessing):
    """The target says the end in the middle of what the draft guessed right."""
    text = ask(plain, (prompt_of(4), greedy(16)))[0].token_ids
    for at in range(1, 8, 2):
        stop = text[at]
        first = text.index(stop)
        params = greedy(16, stop_token_ids=[stop])
        request = (prompt_of(4), params)
        expected = ask(plain, request)[0]
        assert expected.token_ids == text[: first + 1]
        guessing.drafter.texts, guessing.drafter.script = [[*prompt_of(4), *text]], right  # beyond the end too
        check_same(expected, ask(guessing, request)[0])


@pytest.mark.parametrize("at", [1, 3, 4, 7])
def test_stop_strings_end_at_the_token_that_completes_them(plain, guessing, at):
    whole = ask(plain, (prompt_of(7), greedy(20)))[0]
    stop = whole.text[at : at + 3]
    for changes in ({"include_stop_str_in_output": True}, {"min_tokens": 9}):
        request = (prompt_of(7), greedy(20, stop=stop, logprobs=1, **changes))
        expected = ask(plain, request)[0]
        guessing.drafter.texts, guessing.drafter.script = [[*prompt_of(7), *whole.token_ids]], right
        check_same(expected, ask(guessing, request)[0])


@pytest.mark.parametrize("script", [right, sometimes], ids=["right", "sometimes"])
def test_several_answers_of_one_prompt(plain, guessing, script):
    def ask_two(core: EngineCore) -> list[Answer]:
        core.add_request("two", prompt_of(6), drawn(11, 12, n=2, logprobs=1))
        answers = drain(core)
        return [answers["two", i] for i in range(2)]

    expected = ask_two(plain)
    teach(guessing, [(prompt_of(6), None)] * 2, expected, script)
    for one, other in zip(expected, ask_two(guessing), strict=True):
        check_same(one, other)


@pytest.mark.parametrize("script", [right, sometimes, wrong], ids=["right", "sometimes", "wrong"])
def test_aborts_in_between_change_no_other_answer(plain, guessing, script):
    stay = [(prompt_of(10, i), greedy(18)) for i in range(2)]
    go = [(prompt_of(12, 10 + i), greedy(22)) for i in range(3)]
    expected = ask(plain, *stay, *go)
    teach(guessing, stay + go, expected, script)
    for first in (1, 2):
        for i, (prompt, params) in enumerate(stay + go):
            guessing.add_request(f"r{i}", prompt, params)
        answers = {(f"r{i}", 0): Answer() for i in range(5)}
        for i in range(first + 3):
            for delta in guessing.step():
                answers[delta.request_id, 0].take(delta)
            if i >= first:
                guessing.abort_request(f"r{2 + i - first}")
        drain(guessing, answers)
        for i in range(2):
            check_same(expected[i], answers[f"r{i}", 0])
        for i in range(2, 5):
            told = answers[f"r{i}", 0].token_ids
            assert told == expected[i].token_ids[: len(told)]


def steps_with(core: EngineCore, request, script) -> int:
    core.drafter.script = script
    return steps_of(core, request)[1]


def test_right_drafts_take_a_fifth_of_the_steps_and_wrong_ones_no_more_than_plain(plain, guessing):
    request = (prompt_of(5), greedy(41))
    expected, plain_steps = steps_of(plain, request)
    teach(guessing, [request], expected)
    ahead = int(guessing.replica.overlap)  # launched before the end was known
    assert plain_steps == 41
    guessing.drafter.num_lost = 0
    assert steps_with(guessing, request, right) in (9, 9 + ahead), "one token of the prompt's step, then five a step"
    assert guessing.drafter.num_lost <= K + 2 * K * ahead, "but for the guesses beyond the end"
    for script in (wrong, nothing, says(NO_GUESS, 0)):
        assert steps_with(guessing, request, script) in (41, 41 + ahead)
    assert steps_with(guessing, request, one_more_each_time) < 25
    answer = ask(guessing, request)[0]
    assert 10 < answer.metrics.num_accepted_tokens < answer.metrics.num_draft_tokens


def test_a_replay_ahead_is_what_was_tried(guessing):
    """Else the tests of steps ahead of their tokens would be those of eager ones."""
    core, seen = guessing, []
    step = core.replica.step

    def watched(plan, prefill_limit):
        waiting, launched = len(core.replica._in_flight), core.replica.num_steps
        result = step(plan, prefill_limit)
        seen.append(waiting * (core.replica.num_steps - launched))
        return result

    before = sum(g.num_replays for g in core.recorder.graphs)
    core.replica.step = watched
    try:
        ask(core, (prompt_of(5), greedy(30)))
    finally:
        del core.replica.step
    replays = sum(g.num_replays for g in core.recorder.graphs) - before
    assert (sum(seen) > 3) is (replays > 3) is core.replica.overlap


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1, 2, 3, 7, 12, 17])
def test_prompts_in_chunks(checkpoint, plain, kind, budget):
    core = build(checkpoint, K, kind == "ahead", max_model_len=160, max_num_seqs=3, max_num_batched_tokens=budget)
    requests = [(prompt_of(n, n), greedy(10, prompt_logprobs=1)) for n in (1, 18, 33)]
    requests.append((prompt_of(20), drawn(8, 12)))
    check(plain, core, requests, right if budget > 3 else sometimes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", [right, one_more_each_time, wrong], ids=["right", "in turn", "wrong"])
def test_small_pools(checkpoint, plain, kind, script):
    """Requests push each other out, guesses find no block, and what was computed again is guessed from rightly."""
    memory = (9 + 0.5) * BLOCK_BYTES / 2**30
    core = build(checkpoint, K, kind == "ahead", kv_cache_memory_gb=memory, max_num_seqs=4, max_num_batched_tokens=12)
    assert core.replica.runner.num_blocks == 9
    requests = [(prompt_of(3 + 4 * i, i), (drawn(i, 30 - i) if i % 2 else greedy(30 - i))) for i in range(5)]
    requests[2] = (requests[2][0], greedy(25, repetition_penalty=1.3, logprobs=1, prompt_logprobs=0))
    check(plain, core, requests, script)
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 7])
def test_other_numbers_of_guesses(checkpoint, plain, kind, num_draft_tokens):
    core = build(checkpoint, num_draft_tokens, kind == "ahead", max_model_len=160, max_num_seqs=5)
    check(plain, core, MANY, right)
    check(plain, core, MANY, one_more_each_time)


@pytest.mark.parametrize("seed", range(4))
def test_plans_that_change_in_every_step(plain, guessing, monkeypatch, seed):
    """Guesses made and not verified, verified and none made, some of what was made: whatever was measured to pay."""
    rng, plans = random.Random(seed), []

    def plan(new) -> GuessPlan:
        plans.append(GuessPlan(rng.randint(0, K), rng.randint(0, K)))
        return plans[-1]

    monkeypatch.setattr(guessing, "_plan", plan)
    check(plain, guessing, MANY, [right, sometimes][seed % 2])
    assert len({p.num_verify - p.num_propose for p in plans}) > 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["mla", "llama"])
def test_a_real_draft_changes_no_answer(tmp_path, checkpoint, plain, style, kind):
    """One with random weights, which guesses little; its own steps run in every step of the target."""
    widths = {"kv_lora_rank": 32, "nope": 16, "rope": 8, "value": 16, "num_heads": 4, "q_lora_rank": 32}
    shape = DraftShape(style, SMALL.hidden_size, SMALL.vocab_size, 64, **widths, num_kv_heads=2, head_dim=16)
    write_draft(tmp_path / "draft", shape, seed=3, layer_ids=(0, 1, 2))
    core = build_real(checkpoint, tmp_path / "draft", 3, kind == "ahead", max_model_len=160, max_num_seqs=5)
    for one, other in zip(ask(plain, *MANY), ask(core, *MANY), strict=True):
        check_same(one, other)
        assert other.metrics.num_draft_tokens > 0


@pytest.mark.parametrize("script", [right, sometimes], ids=["right", "sometimes"])
def test_eager_steps_wait_for_the_tokens_of_guesses(checkpoint, plain, script):
    """Where steps overlap and none is replayed, as on a GPU without graphs."""
    core = build(checkpoint, K, max_model_len=160, max_num_seqs=5)
    core.replica.overlap = True
    check(plain, core, MANY, script)


def tokens_on_ranks(rank: int, checkpoint: str) -> list[list[list[int]]]:
    """Of the engine without a draft, then with one: eager, and ahead."""
    settings = {"tp": 2, "ep": 2, "max_model_len": 160, "max_num_seqs": 5}

    def start(config: EngineConfig) -> EngineCore:
        return build_core(config, rank)

    expected = ask(build(checkpoint, None, start=start, **settings), *MANY)
    found = [expected]
    for replays in (False, True):
        core = build(checkpoint, K, replays, start, **settings)
        teach(core, MANY, expected, one_more_each_time)
        found.append(ask(core, *MANY))
        assert sum(a.metrics.num_accepted_tokens for a in found[-1]) > 10
        core.replica.runner.close()
    return [[answer.token_ids for answer in answers] for answers in found]


def test_two_ranks_decide_alike(tmp_path, checkpoint, plain):
    expected = [answer.token_ids for answer in ask(plain, *MANY)]
    for found in run_ranks(2, tmp_path, tokens_on_ranks, str(checkpoint)):
        assert found == [expected] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_fill_the_context_to_the_last_token(checkpoint, plain, kind):
    """Guesses reach beyond the longest request, where there is neither slot nor position."""
    core = build(checkpoint, K, kind == "ahead", max_model_len=32, max_num_seqs=2)
    short = build(checkpoint, None, max_model_len=32, max_num_seqs=2)
    for length in (1, 23, 24, 27, 30, 31):
        for script in (right, wrong):
            check(short, core, [(prompt_of(length), greedy(None))], script)
