"""Steps that are computed once: rows of prompts, decodes and guesses side by side, and which of them are drawn from."""

from __future__ import annotations

import numpy as np
import torch

from engine.input_batch import InputBatch
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledRequest, SchedulerOutput

CPU = torch.device("cpu")


def request(prompt: list[int], output: list[int], blocks: list[int], guesses: list[int] = (), **params) -> Request:
    found = Request("r", prompt, SamplingParams(**params), 5, 99, output_token_ids=output, block_ids=blocks)
    found.guess_ids = list(guesses)
    return found


def test_a_decode_a_first_chunk_and_a_later_chunk_over_the_border_of_prompt_and_output():
    items = [
        ScheduledRequest(request([10, 11, 12, 13], [14], [7, 2]), 4, 1, True),
        ScheduledRequest(request([20, 21, 22, 23, 24], [], [5, 1]), 0, 3, False),
        ScheduledRequest(request([30, 31, 32, 33, 34, 35, 36], [37, 38], [3, 9, 4]), 5, 4, True),
    ]
    batch = InputBatch(4, CPU).build(SchedulerOutput(items), None)
    assert batch.token_ids_T.tolist() == [14, 20, 21, 22, 35, 36, 37, 38]
    assert batch.positions_T.tolist() == [4, 0, 1, 2, 5, 6, 7, 8]
    assert batch.slots_T.tolist() == [8, 20, 21, 22, 37, 38, 39, 16]
    assert batch.block_table_NB.tolist() == [[7, 2, 0], [5, 1, 0], [3, 9, 4]], "blocks not reached yet too"
    assert batch.query_lens == [1, 3, 4] and batch.seq_lens == [5, 3, 9]
    assert all(t.dtype == torch.int64 for t in (batch.token_ids_T, batch.positions_T, batch.slots_T))


def guessing_step() -> SchedulerOutput:
    """Two guesses of three are verified, a chunk of a prompt, a prompt's end, and one guess of two."""
    return SchedulerOutput(
        [
            ScheduledRequest(request([10, 11, 12], [13], [7, 2], [14, 15, 16], temperature=0.0), 3, 1, True, 2),
            ScheduledRequest(request([20, 21, 22, 23, 24], [], [5, 1]), 0, 3, False),
            ScheduledRequest(request([29, 30, 31, 32], [], [3], [99], top_k=4), 1, 3, True),
            ScheduledRequest(request([40], [41], [9], [42, 43]), 1, 1, True, 1),
        ]
    )


def test_guesses_follow_their_request():
    inputs = InputBatch(4, CPU, num_guesses=3)
    batch = inputs.build(guessing_step(), None)
    assert batch.token_ids_T.tolist() == [13, 14, 15, 20, 21, 22, 30, 31, 32, 41, 42]
    assert batch.positions_T.tolist() == [3, 4, 5, 0, 1, 2, 1, 2, 3, 1, 2]
    assert batch.slots_T.tolist() == [31, 8, 9, 20, 21, 22, 13, 14, 15, 37, 38], "over the border of a block"
    assert batch.query_lens == [3, 3, 3, 2] and batch.seq_lens == [6, 3, 4, 3]
    assert batch.query_starts_N1.tolist() == [0, 3, 6, 9, 11] and batch.num_tokens_1.tolist() == [11]
    assert batch.max_query_len == 3


def test_rows_that_are_drawn_from_repeat_where_others_have_more():
    output = guessing_step()
    inputs = InputBatch(4, CPU, num_guesses=3)
    sampled = inputs.sampled_rows(output, inputs.build(output, None))
    assert sampled.rows_M.tolist() == [0, 1, 2, 8, 8, 8, 9, 10, 10]
    assert sampled.rows.sampling.places.tolist() == [4, 5, 6, 4, 4, 4, 2, 3, 3], "a place ahead of its row"
    assert sampled.rows.sampling.temperature.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1] and sampled.draws
    assert sampled.rows.sampling.top_k.tolist() == [0, 0, 0, 4, 4, 4, 0, 0, 0]
    assert sampled.rows.guesses_NK.tolist() == [[14, 15, 16], [-1, -1, -1], [42, -1, -1]], "one more is compared alone"
    assert sampled.rows.starts_N.tolist() == [3, 3, 1] and sampled.requests.limits_N.tolist() == [8, 4, 4]
    assert sampled.requests.table_NB.tolist() == [[7, 2, 0, 0], [3, 0, 0, 0], [9, 0, 0, 0]], "a chain may go beyond"


def test_no_row_is_drawn_from_before_a_prompt_ends():
    output = SchedulerOutput(guessing_step().scheduled[1:2])
    inputs = InputBatch(4, CPU, num_guesses=3)
    assert inputs.sampled_rows(output, inputs.build(output, None)) is None


def test_a_drafts_next_tokens_go_on_in_the_prompt_and_end_where_they_are_drawn():
    output = guessing_step()
    inputs = InputBatch(4, CPU, num_guesses=3)
    found = inputs.next_tokens(output, inputs.build(output, None)).tolist()
    assert [found[row] for row in (3, 4, 5, 6, 7)] == [21, 22, 23, 31, 32], "also over the border of a chunk"
    assert [found[row] for row in (2, 8, 10)] == [0, 0, 0]


def test_pending_tokens_are_those_committed_last():
    """The row of the state is the request's of the step before; the token the last of those accepted."""
    inputs = InputBatch(4, CPU, num_guesses=2)
    first, second = request([1, 2], [], [3]), request([4, 5], [], [6])
    for one in (first, second):
        one.num_pending, one.num_computed_tokens = 1, 2
    inputs.sampled.belong_to([second, first])
    inputs.sampled.state.tokens_SW[:2] = torch.from_numpy(np.array([[50, 51, 52], [60, 61, 62]]))
    inputs.sampled.state.accepted_S[1] = 0
    batch = inputs.build(SchedulerOutput([ScheduledRequest.next_of(r, 1) for r in (first, second)]), None)
    assert batch.token_ids_T.tolist() == [60, 50] and batch.positions_T.tolist() == [2, 2]


def test_a_chain_of_guesses_beyond_a_request_s_blocks_reads_the_null_block():
    """Kernels read the table as far as a length says."""
    for num_guesses, width in ((1, 2), (3, 3), (5, 4), (7, 5)):
        item = ScheduledRequest(request([1] * 4, [], [3]), 0, 4, True)
        batch = InputBatch(4, CPU, num_guesses=num_guesses).build(SchedulerOutput([item]), None)
        assert batch.block_table_NB.tolist() == [[3] + [0] * (width - 1)]
        assert batch.block_table_NB.shape[1] * 4 >= 4 + 2 * num_guesses
