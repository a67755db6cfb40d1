from __future__ import annotations

import torch

from engine.input_batch import InputBatch
from engine.request import Request, SamplingParams
from engine.scheduler import ScheduledRequest, SchedulerOutput


def request(prompt: list[int], output: list[int], blocks: list[int]) -> Request:
    return Request("r", prompt, SamplingParams(), 0, 99, output_token_ids=output, block_ids=blocks)


def test_a_decode_a_first_chunk_and_a_later_chunk_over_the_border_of_prompt_and_output():
    items = [
        ScheduledRequest(request([10, 11, 12, 13], [14], [7, 2]), 4, 1, True),
        ScheduledRequest(request([20, 21, 22, 23, 24], [], [5, 1]), 0, 3, False),
        ScheduledRequest(request([30, 31, 32, 33, 34, 35, 36], [37, 38], [3, 9, 4]), 5, 4, True),
    ]
    batch = InputBatch(4, torch.device("cpu")).build(SchedulerOutput(items), None)
    assert batch.token_ids_T.tolist() == [14, 20, 21, 22, 35, 36, 37, 38]
    assert batch.positions_T.tolist() == [4, 0, 1, 2, 5, 6, 7, 8]
    assert batch.slots_T.tolist() == [8, 20, 21, 22, 37, 38, 39, 16]
    assert batch.block_table_NB.tolist() == [[7, 2, 0], [5, 1, 0], [3, 9, 4]], "blocks not reached yet too"
    assert batch.query_lens == [1, 3, 4] and batch.seq_lens == [5, 3, 9]
    assert all(t.dtype == torch.int64 for t in (batch.token_ids_T, batch.positions_T, batch.slots_T))
