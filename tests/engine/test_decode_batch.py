"""The fixed inputs of decode steps: requests, padding, block tables that grow, change hands and shrink."""

from __future__ import annotations

import pytest
import torch

from engine import verify
from engine.batch import ForwardBatch
from engine.decode_batch import BlockTable, DecodeBatch, bucket_sizes
from engine.input_batch import SampledTokens
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledRequest
from engine.verify import VerifyRows

CPU = torch.device("cpu")
SIZE = 4


def request(tokens: int, blocks: list[int], pending: int = 0, guesses: tuple[int, ...] = (), **params) -> Request:
    prompt = [10 * tokens + i for i in range(tokens)]
    found = Request("r", prompt, SamplingParams(**params), 77, 99, block_ids=blocks, num_pending=pending)
    found.num_computed_tokens, found.guess_ids = found.num_tokens - 1, list(guesses)
    return found


def items(*requests: Request) -> list[ScheduledRequest]:
    return [ScheduledRequest.next_of(r, 1) for r in requests]


def batch_of(num_requests: int, most: int = 8, num_guesses: int = 0) -> DecodeBatch:
    sampled = SampledTokens(most, CPU, num_guesses)
    return DecodeBatch(num_requests, SIZE, BlockTable(most, 5, CPU), sampled, CPU)


def step_of(inputs: DecodeBatch, width: int) -> tuple[VerifyRows, ForwardBatch]:
    """What a decode step makes of its inputs before the model's part."""
    rows = verify.verify_rows(inputs.requests, inputs.sampled.state, inputs.sampling, width, SIZE)
    starts = torch.arange(0, inputs.num_requests * width + 1, width, dtype=torch.int32)
    return rows, inputs.forward_batch(rows, starts, width, None)


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (64, [1, 2, 4, 8, 16, 32, 64])])
def test_buckets_are_those_that_can_occur(most, sizes):
    assert bucket_sizes(most) == sizes


def test_rows_and_inert_padding_also_after_a_larger_step():
    inputs = batch_of(4)
    first, second, third = request(5, [7, 2]), request(3, [4]), request(9, [1, 3, 5])
    for _ in range(2):
        inputs.fill(items(first, second, third), 1)
    for _ in range(2):
        inputs.fill(items(second, first), 1)
    rows, batch = step_of(inputs, 1)
    assert batch.token_ids_T.tolist() == [32, 54, 0, 0]
    assert batch.positions_T.tolist() == [2, 4, 0, 0]
    assert batch.slots_T.tolist() == [18, 8, 0, 0], "padding writes into the null block"
    assert batch.seq_lens_N.tolist() == [3, 5, 0, 0] and batch.num_tokens_1.tolist() == [2]
    assert inputs.num_real_1.tolist() == [2]
    assert batch.query_starts_N1.tolist() == [0, 1, 2, 3, 4] and batch.max_query_len == 1
    assert batch.block_table_NB[0, :1].tolist() == [4] and batch.block_table_NB[1, :2].tolist() == [7, 2]
    assert inputs.requests.sources_N.tolist() == [-1] * 4 and rows.sampling.temperature.tolist() == [1, 1, 0, 0]


def test_rows_of_guesses_and_inert_padding_after_a_larger_step():
    """One guess is missing, one has no slot; what padding requests held before is gone."""
    inputs = batch_of(3, num_guesses=2)
    first, second = request(4, [7, 2], guesses=(90, 91)), request(3, [4], guesses=(80,))
    third = request(7, [1, 3], guesses=(70, 71))
    for _ in range(2):
        inputs.fill(items(first, second, third), 3)
    for _ in range(2):
        inputs.fill(items(third, second), 3)
    rows, batch = step_of(inputs, 3)
    assert batch.token_ids_T.tolist() == [76, 70, 0, 32, 80, 0, 0, 0, 0]
    assert batch.positions_T.tolist() == [6, 7, 8, 2, 3, 4, 0, 0, 0]
    assert batch.slots_T.tolist() == [14, 15, 0, 18, 19, 0, 0, 0, 0]
    assert rows.guesses_NK.tolist() == [[70, -1], [80, -1], [-1, -1]]
    assert batch.seq_lens_N.tolist() == [9, 5, 0] and batch.max_query_len == 3
    assert batch.num_tokens_1.tolist() == [6] and inputs.num_real_1.tolist() == [2]
    assert rows.sampling.places.tolist()[:6] == [7, 8, 9, 3, 4, 5]


def test_pending_tokens_come_from_the_rows_that_sampled_them():
    inputs = batch_of(2)
    first, second = request(5, [7, 2], pending=1), request(3, [4])
    inputs.sampled.belong_to([second, first])
    inputs.sampled.state.tokens_SW[1] = 66
    inputs.fill(items(first, second), 1)
    rows, batch = step_of(inputs, 1)
    assert inputs.requests.sources_N.tolist() == [1, -1] and batch.token_ids_T.tolist() == [66, 32]
    assert rows.sampling.places.tolist() == [6, 3]


def test_pending_tokens_start_after_the_guesses_accepted_on_the_device():
    """The host's start is the least that it can be."""
    inputs = batch_of(1, num_guesses=2)
    one = request(5, [7, 2], pending=1)
    inputs.sampled.belong_to([request(1, [1]), one])
    state = inputs.sampled.state
    state.tokens_SW[1], state.guesses_SK[1] = torch.tensor([60, 61, 62]), torch.tensor([63, 64])
    state.accepted_S[1] = 1
    inputs.fill(items(one), 3)
    rows, batch = step_of(inputs, 3)
    assert batch.token_ids_T.tolist() == [61, 63, 0] and batch.positions_T.tolist() == [6, 7, 8]
    assert batch.slots_T.tolist() == [10, 11, 0] and batch.seq_lens_N.tolist() == [9]
    assert rows.guesses_NK.tolist() == [[63, -1]]


def test_the_tensors_stay_in_place():
    inputs = batch_of(2, num_guesses=1)

    def pointers() -> list[int]:
        found = [*inputs.requests, *(getattr(inputs.sampling, n) for n in inputs.sampling.NAMES)]
        return [t.data_ptr() for t in [*found, inputs.num_rows_1, inputs.num_real_1]]

    before = pointers()
    inputs.fill(items(request(5, [7, 2])), 2)
    assert pointers() == before


def test_too_many_requests_are_refused():
    with pytest.raises(ValueError, match="2 requests do not fit a step of 1;"):
        batch_of(1).fill(items(request(1, [1]), request(1, [2])), 1)


def test_block_tables_follow_their_requests():
    table = BlockTable(8, 5, CPU)
    some = [request(4 * i + 1, list(range(9 * i, 9 * i + 1 + i % 4))) for i in range(8)]
    for _ in range(60):
        victim = some[_ % 8]
        if _ % 5 == 4:
            victim.block_ids = [900 + _]
        elif len(victim.block_ids) < 5:
            victim.block_ids.append(100 + _)
        if _ % 7 == 6:
            some.append(some.pop(0))
        present = some[: 3 + _ % 6]
        table.update(items(*present))
        for row, one in enumerate(present):
            assert table.table_NB[row, : len(one.block_ids)].tolist() == one.block_ids
