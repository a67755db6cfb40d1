from __future__ import annotations

import pytest
import torch

from engine.attention.backend import choose
from tests.mla_layer import batch_with

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_takes_triton_for_bfloat16_on_cuda_alone():
    assert choose("auto", CUDA, torch.bfloat16) == "triton"
    assert choose("auto", CUDA, torch.float32) == choose("auto", CPU, torch.bfloat16) == "reference"
    assert choose("reference", CUDA, torch.bfloat16) == "reference"
    with pytest.raises(ValueError, match="bfloat16 on CUDA"):
        choose("triton", CPU, torch.bfloat16)


@pytest.mark.parametrize("name", ["auto", "triton", "reference"])
def test_rows_of_bytes_need_a_gpu_that_knows_the_type(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"capability 8\.9 or newer, and this one has 8\.0; use kv_cache_dtype='auto'"):
        choose(name, CUDA, torch.bfloat16, in_bytes=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose("auto", CUDA, torch.bfloat16, in_bytes=True) == "triton"
    assert choose("auto", CPU, torch.float32, in_bytes=True) == "reference"


def test_a_mixed_batch_falls_into_runs_of_short_and_long_requests():
    batch = batch_with(torch.arange(8).view(4, 2), [1, 20, 4, 2], [9, 20, 6, 7])
    parts = list(batch.parts(16))
    assert [(short, tokens.start, tokens.stop) for short, tokens, _ in parts] == [
        (True, 0, 1), (False, 1, 21), (True, 21, 27),
    ]  # fmt: skip
    last = parts[-1][2]
    assert last.query_starts_N1.tolist() == [0, 4, 6] and last.seq_lens_N.tolist() == last.seq_lens == [6, 7]
    assert last.block_table_NB.tolist() == [[4, 5], [6, 7]] and last.max_query_len == 4
    assert last.num_tokens_1.tolist() == [6] and last.query_lens == [4, 2]
    assert batch.parts(20)[0][2] is batch
