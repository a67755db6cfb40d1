"""Known faults of other engines' EAGLE-3 drafts, by number, and the tests that would see each here.

Where several tests share a fault, each looks at another part of it. Faults without a test cannot occur yet: `ABSENT`
says why. Tests that nothing else needed are below the table.
"""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest
import torch

from engine import sampling, speculation
from engine.bench.spec_text import PROMPTS, accept_length, read_prompts
from engine.comm.parallel_state import ParallelState
from engine.config import TINY_CHECKPOINT
from engine.core import EngineCore
from engine.kernels.reference_kernels import ReferenceKernels
from engine.layers.embedding import LMHead
from engine.sampling_params import SamplingParams
from tests.answers import Answer, ask, drain
from tests.checkpoints import SMALL, build_checkpoint
from tests.drafts import DraftShape, write_draft
from tests.scripted_drafts import build, build_real, right, sometimes, teach, wrong

HERE = "tests/test_draft_pitfalls.py"
CONFIG, WEIGHTS = "tests/draft/eagle3/test_config.py", "tests/draft/eagle3/test_weights.py"
DRAFTER, ENGINE = "tests/draft/eagle3/test_drafter.py", "tests/engine/test_speculation.py"
SCHEDULER, CHOICE = "tests/engine/test_scheduler.py", "tests/engine/test_draft_choice.py"
CASES: dict[int, tuple[str, ...]] = {
    # Layer ids off by one: quiet loss of acceptance.
    1: (
        f"{CONFIG}::test_both_numberings_come_to_the_same_layers",
        "tests/models/test_draft_target.py::test_features_are_the_streams_that_enter_the_layers",
    ),
    # Acceptance far below what training saw.
    2: (
        f"{HERE}::test_the_trained_draft_is_right_as_often_as_its_card_says",
        f"{WEIGHTS}::test_the_log_tells_which_states_are_captured",
    ),
    # An accept length of exactly one and no error.
    3: (
        f"{DRAFTER}::test_only_the_features_of_all_layers_will_do",
        f"{HERE}::test_a_draft_that_is_never_right_is_told_once",
    ),
    # The table of a reduced vocabulary missing or absolute.
    4: (
        f"{WEIGHTS}::test_the_table_of_a_reduced_vocabulary",
        "tests/draft/eagle3/test_draft_training.py::test_export_round_trip",
    ),
    # Config keys that nothing reads.
    5: (
        f"{CONFIG}::test_what_would_compute_something_else_is_refused",
        f"{WEIGHTS}::test_tensors_that_are_missing_or_left_over",
    ),
    # KV of accepted tokens left from the draft's own states.
    6: (
        f"{HERE}::test_draft_kv_after_many_rounds_is_that_of_a_fresh_prefill",
        f"{DRAFTER}::test_real_features_take_the_place_of_guesses",
    ),
    # A chunk's last row paired with the sampled token instead of the prompt's next.
    7: (
        f"{HERE}::test_draft_kv_does_not_depend_on_chunks",
        f"{HERE}::test_draft_kv_of_a_request_that_gave_way_in_its_output",
        "tests/engine/test_input_batch.py::test_a_drafts_next_tokens_go_on_in_the_prompt_and_end_where_they_are_drawn",
    ),
    # Equal prompts in one step.
    9: (f"{HERE}::test_equal_prompts_in_one_step",),
    # More blocks reserved than used.
    10: (
        f"{HERE}::test_guesses_reserve_no_more_than_a_step_of_slots",
        f"{SCHEDULER}::test_guesses_that_no_answer_can_use_are_not_verified",
    ),
    # Ranks that make different numbers of draft steps.
    11: (
        f"{ENGINE}::test_two_ranks_decide_alike",
        "tests/engine/test_accounting.py::test_rounds_of_a_step_on_two_ranks",
    ),
    # Hangs near the longest request; ranks that disagree on graph or eager.
    12: (
        f"{ENGINE}::test_answers_that_fill_the_context_to_the_last_token",
        "tests/engine/test_graph.py::test_ranks_keep_the_same_buckets_though_one_has_less_memory",
    ),
    # Stale values in padded rows.
    13: (
        "tests/engine/test_decode_batch.py::test_rows_of_guesses_and_inert_padding_after_a_larger_step",
        f"{DRAFTER}::test_padding_rows_change_nothing",
        f"{HERE}::test_padding_that_holds_other_requests_guesses",
        f"{ENGINE}::test_any_number_of_requests",
    ),
    # A draft that takes the target's quantisation.
    14: (f"{WEIGHTS}::test_quantisation_of_the_target_is_not_inherited",),
    # Contexts longer than the draft was made for.
    15: (
        f"{CHOICE}::test_past_the_draft_nothing_is_guessed",
        f"{CHOICE}::test_one_request_past_the_draft_makes_guessing_pay_less",
        f"{DRAFTER}::test_chunks_and_chains_equal_the_whole_sequence",
        "tests/test_speculation_reports.py::test_requests_longer_than_the_draft",
    ),
    # Temperature that verifying forgets.
    17: (f"{ENGINE}::test_every_parameter_means_the_same", "tests/engine/test_speculation_law.py"),
    # Parsers of streams that take one token a piece.
    18: (
        "tests/engine/server/test_output_parser.py::test_b029_b035_b097_any_cut_reads_the_same",
        "tests/engine/test_output_processor.py::test_steps_of_several_tokens_say_what_single_ones_say",
    ),
    # Settings that target and draft share by accident.
    19: (
        f"{ENGINE}::test_a_real_draft_changes_no_answer",
        "tests/draft/eagle3/test_ranks.py::test_any_number_of_ranks_guesses_alike",
    ),
    # Ranks that disagree on whose embedding it is.
    20: (
        f"{WEIGHTS}::test_the_drafts_own_embedding_and_head_come_first",
        "tests/draft/eagle3/test_ranks.py::test_any_number_of_ranks_guesses_alike",
    ),
    # The draft's KV of a cached prefix was made for another next token.
    8: (
        "tests/engine/test_prefix_cache.py::test_a_draft_wants_the_token_after_a_block_to_be_the_same",
        "tests/engine/test_prefix_cache.py::test_without_that_rule_a_draft_would_read_what_was_made_for_another_token",
        "tests/engine/test_prefix_answers.py::test_guesses_are_accepted_after_a_hit_as_often_as_in_a_cold_run",
    ),
    # Offloaded KV and a draft.
    22: ("tests/engine/test_host_cache.py::test_an_answer_from_restored_blocks_is_that_of_a_cold_run",),
    # A number of guesses that changes, to none and back.
    21: (
        f"{ENGINE}::test_plans_that_change_in_every_step",
        "tests/engine/test_graph.py::test_a_plan_gets_its_graph_or_the_next_smaller_one",
        f"{CHOICE}::test_acceptance_that_goes_and_comes_back",
    ),
    # Greedy text that is not the plain one.
    24: (
        "tests/test_equality.py::test_no_draft_changes_a_token",
        "tests/test_equality.py::test_the_trained_draft_changes_no_token",
        "tests/gpu/test_speculation.py::test_the_bundled_draft_changes_no_token",
    ),
    # Ties broken differently by target and draft.
    25: (f"{HERE}::test_of_equal_logits_the_lowest_id_wins_in_target_and_draft",),
    # `norm_before_residual` unread.
    26: (f"{DRAFTER}::test_each_flag_changes_the_states",),
}
ABSENT = {
    16: "no structured output",
    23: "no trees: a chain's tokens are drawn by the kernels of plain decoding",
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def test_each_number_has_tests_that_exist_or_a_reason():
    assert sorted([*CASES, *ABSENT]) == list(range(1, 27))
    root = Path(__file__).resolve().parent.parent
    for name in {name for names in CASES.values() for name in names}:
        file, _, test = name.partition("::")
        tree = ast.parse((root / file).read_text())
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
        assert test in found if test else found, name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("pitfalls") / "model", SMALL)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    shape = DraftShape("llama", SMALL.hidden_size, SMALL.vocab_size, 64, num_heads=4, num_kv_heads=2, head_dim=16)
    return write_draft(tmp_path_factory.mktemp("pitfalls") / "draft", shape, seed=5, layer_ids=(0, 1, 2))


@pytest.fixture(scope="module")
def trained() -> EngineCore:
    return build_real(TINY_CHECKPOINT, "auto", 3, max_num_seqs=8, max_model_len=512, kv_cache_memory_gb=0.05)


def draft_kv(core: EngineCore, request_id: str) -> tuple[list[int], torch.Tensor]:
    """A running request's tokens, and its draft KV [positions, width] as far as both tokens of a pair are known."""
    request = core.replica.scheduler.get(request_id)
    cache = core.replica.runner.sampled_step.cache
    return request.token_ids(0, request.num_tokens), cache[request.block_ids].flatten(0, 1)[: request.num_tokens - 1]


def run_until(core: EngineCore, request_id: str, num_tokens: int) -> None:
    while (
        core.replica.scheduler.get(request_id) is None or core.replica.scheduler.get(request_id).num_tokens < num_tokens
    ):
        core.step()


def kv_of_prefill(core: EngineCore, token_ids: list[int]) -> torch.Tensor:
    """Draft KV of a request whose prompt is this text, all but its last position's."""
    core.add_request("fresh", token_ids, PARAMS)
    run_until(core, "fresh", len(token_ids) + 1)
    kv = draft_kv(core, "fresh")[1][: len(token_ids) - 1].clone()
    core.abort_request("fresh")
    drain(core)
    return kv


def test_the_trained_draft_is_right_as_often_as_its_card_says(trained):
    """Held-out text, three guesses: 3.2 tokens a step on tools and 3.3 on chat by the card."""
    prompts = read_prompts(PROMPTS, 3)
    length, _ = accept_length(trained, [*prompts["tools"], *prompts["chat"]], 24)
    assert length > 2.5


def test_draft_kv_after_many_rounds_is_that_of_a_fresh_prefill(trained):
    prompt = read_prompts(PROMPTS, 1)["chat"][0]
    trained.add_request("long", prompt, PARAMS)
    run_until(trained, "long", len(prompt) + 30)
    tokens, kv = draft_kv(trained, "long")
    kv = kv.clone()
    accepted = trained.replica.scheduler.get("long").num_accepted_tokens
    assert accepted > 5, "some of it was guessed first"
    trained.abort_request("long")
    drain(trained)
    assert torch.allclose(kv, kv_of_prefill(trained, tokens), atol=1e-4)


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_draft_kv_does_not_depend_on_chunks(checkpoint, draft, budget):
    prompt = [7 * i % 290 for i in range(90)]
    whole, cut = (
        build_real(checkpoint, draft, 3, max_num_batched_tokens=size, max_num_seqs=2) for size in (2048, budget)
    )
    assert torch.allclose(kv_of_prefill(whole, prompt), kv_of_prefill(cut, prompt), atol=1e-5)


def test_draft_kv_of_a_request_that_gave_way_in_its_output(checkpoint, draft):
    """It is computed again in chunks that end in its output, where the next token is known and not drawn."""
    core = build_real(checkpoint, draft, 3, max_num_batched_tokens=7, max_num_seqs=2)
    prompt = [11 * i % 290 for i in range(10)]
    core.add_request("one", prompt, PARAMS)
    run_until(core, "one", 30)
    core.replica.scheduler._preempt(core.replica.scheduler.get("one"))
    run_until(core, "one", 36)
    tokens, kv = draft_kv(core, "one")
    kv = kv.clone()
    core.abort_request("one")
    drain(core)
    assert core.stats().num_preemptions == 1
    assert torch.allclose(kv, kv_of_prefill(core, tokens), atol=1e-5)


def test_equal_prompts_in_one_step(checkpoint):
    """Each has its own blocks: neither reads what the other has not written yet."""
    request = ([3, 1, 4, 1, 5, 9], PARAMS)
    expected = ask(build(checkpoint, None), request)
    core = build(checkpoint, 4, max_num_seqs=4)
    teach(core, [request], expected, sometimes)
    for answer in ask(core, *[request] * 4):
        assert answer.token_ids == expected[0].token_ids
    assert core.drafter.num_known > 4 * 10


@pytest.mark.parametrize("num_guesses", [1, 7])
def test_guesses_reserve_no_more_than_a_step_of_slots(checkpoint, num_guesses):
    """Blocks in use are those of the tokens, of a step's guesses and of the draft's chain after them."""
    request = ([3, 1, 4], SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True))
    core = build(checkpoint, num_guesses, max_model_len=256, max_num_seqs=2)
    teach(core, [request], [Answer(token_ids=[])], wrong)
    core.add_request("r", *request)
    size = core.replica.scheduler.kv_cache.block_size
    while core.has_unfinished():
        core.step()
        running = core.replica.scheduler.get("r")
        if running is not None:
            most = running.num_tokens + 1 + 2 * num_guesses
            assert len(running.block_ids) <= -(-most // size)
    assert core.stats().kv_cache_usage == 0.0


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_draft_that_is_never_right_is_told_once(checkpoint, caplog, monkeypatch, adaptive):
    """Also where the engine asks it now and then alone, since it does not pay."""
    monkeypatch.setattr(speculation, "_NEVER_RIGHT_AFTER", 16)
    requests = [([i, 5, 6], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)) for i in range(4)]
    expected = ask(build(checkpoint, None), *requests)
    for script, warnings in ((wrong, 1), (sometimes, 0)):
        caplog.clear()
        core = build(checkpoint, 2, max_num_seqs=8)
        core._speculation._choice.adaptive = adaptive
        teach(core, requests, expected, script)
        with caplog.at_level(logging.WARNING, "turnout"):
            ask(core, *requests)
        assert sum("never right" in record.message for record in caplog.records) == warnings


def test_padding_that_holds_other_requests_guesses(checkpoint):
    """Replayed steps of 1 to 8 requests after larger ones; what padding rows hold is made worthless in between."""
    requests = [
        ([i + 1, 7, 9, i], SamplingParams(temperature=0.0, max_tokens=5 + i, ignore_eos=True)) for i in range(8)
    ]
    expected = ask(build(checkpoint, None, max_num_seqs=8), *requests)
    core = build(checkpoint, 3, True, max_num_seqs=8)
    teach(core, requests, expected, right)
    state = core.replica.runner.sampled.state
    for count in (8, 3, 5, 1, 7):
        for tensor in (state.tokens_SW, state.guesses_SK):
            tensor.fill_(2**40)
        state.accepted_S.fill_(0)
        answers = ask(core, *requests[:count])
        assert [a.token_ids for a in answers] == [a.token_ids for a in expected[:count]]
    assert sum(graph.num_replays for graph in core.recorder.graphs) > 10


def test_of_equal_logits_the_lowest_id_wins_in_target_and_draft():
    head = LMHead(40, 8, ParallelState(), torch.float32, ReferenceKernels())
    rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    head.weight[:] = torch.nn.functional.normalize(rows)  # so that no row but a copy comes as near to one as itself
    x_SD = head.weight[[13, 29]].clone()
    head.weight[[5, 13, 39]], head.weight[[29, 30]] = head.weight[13].clone(), head.weight[29].clone()
    tokens_S = torch.empty(2, dtype=torch.int64)
    sampling.greedy(head(x_SD), tokens_S)
    assert tokens_S.tolist() == head.argmax(x_SD).tolist() == [5, 29]
