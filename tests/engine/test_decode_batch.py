"""The fixed inputs of decode steps: rows, padding, block tables that grow, change hands and shrink."""

from __future__ import annotations

import pytest
import torch

from engine.decode_batch import BlockTable, DecodeBatch, bucket_sizes
from engine.input_batch import SampledTokens
from engine.request import Request, SamplingParams
from engine.scheduler import ScheduledRequest

CPU = torch.device("cpu")
SIZE = 4


def request(tokens: int, blocks: list[int], pending: int = 0, **params) -> Request:
    prompt = [10 * tokens + i for i in range(tokens)]
    found = Request("r", prompt, SamplingParams(**params), 77, 99, block_ids=blocks, num_pending=pending)
    found.num_computed_tokens = found.num_tokens - 1
    return found


def items(*requests: Request) -> list[ScheduledRequest]:
    return [ScheduledRequest.next_of(r, 1) for r in requests]


def batch_of(rows: int, most: int = 8) -> DecodeBatch:
    return DecodeBatch(rows, SIZE, BlockTable(most, 5, CPU), SampledTokens(most, CPU), CPU)


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (64, [1, 2, 4, 8, 16, 32, 64])])
def test_buckets_are_those_that_can_occur(most, sizes):
    assert bucket_sizes(most) == sizes


def test_rows_and_inert_padding_also_after_a_larger_step():
    inputs = batch_of(4)
    first, second, third = request(5, [7, 2]), request(3, [4]), request(9, [1, 3, 5])
    for _ in range(2):
        inputs.fill(items(first, second, third))
    for _ in range(2):
        inputs.fill(items(second, first))
    batch = inputs.forward_batch(inputs.token_ids_N, None)
    assert batch.token_ids_T.tolist() == [32, 54, 0, 0]
    assert batch.positions_T.tolist() == [2, 4, 0, 0]
    assert batch.slots_T.tolist() == [18, 8, 0, 0], "padding writes into the null block"
    assert batch.seq_lens_N.tolist() == [3, 5, 0, 0] and batch.num_tokens_1.tolist() == [2]
    assert batch.query_starts_N1.tolist() == [0, 1, 2, 3, 4] and batch.max_query_len == 1
    assert batch.block_table_NB[0, :1].tolist() == [4] and batch.block_table_NB[1, :2].tolist() == [7, 2]
    assert inputs.sources_N.tolist() == [-1] * 4 and inputs.sampling.temperature.tolist() == [1, 1, 0, 0]


def test_pending_tokens_come_from_the_rows_that_sampled_them():
    inputs = batch_of(2)
    first, second = request(5, [7, 2], pending=1), request(3, [4])
    inputs.sampled.belong_to([second, first])
    inputs.fill(items(first, second))
    assert inputs.sources_N.tolist() == [1, -1] and inputs.token_ids_N.tolist() == [0, 32]
    assert inputs.sampling.places.tolist() == [6, 3]


def test_the_tensors_stay_in_place():
    inputs = batch_of(2)
    before = inputs.forward_batch(inputs.token_ids_N, None)
    pointers = [t.data_ptr() for t in vars(before).values() if isinstance(t, torch.Tensor)]
    inputs.fill(items(request(5, [7, 2])))
    after = inputs.forward_batch(inputs.token_ids_N, None)
    assert [t.data_ptr() for t in vars(after).values() if isinstance(t, torch.Tensor)] == pointers


def test_too_many_requests_are_refused():
    with pytest.raises(ValueError, match="2 requests do not fit a step of 1 rows"):
        batch_of(1).fill(items(request(1, [1]), request(1, [2])))


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
