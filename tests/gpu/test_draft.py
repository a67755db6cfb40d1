"""EAGLE-3 drafts on a GPU: bfloat16 kernels against float32, and a whole round as one graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draft.base import DraftRows, TargetShape, propose
from engine.comm.parallel_state import ParallelState
from tests.drafts import DraftShape, write_draft
from tests.eagle3_runs import LENGTHS, Run, load, texts
from tests.mla_cases import relative_error

pytestmark = pytest.mark.gpu
TINY = TargetShape(256, 4096, 5)
SHAPES = {
    "mla": DraftShape("mla", 256, 4096, 512, 8, 96, 512, 128, 64, 128, has_embedding=True, fc_norm=True),
    "llama": DraftShape("llama", 256, 4096, 512, 8, num_kv_heads=4, head_dim=64, draft_vocab_size=300),
}
CHUNKS = [(n, 0, length) for n, length in enumerate(LENGTHS)]
LAST = [LENGTHS[0] - 1, sum(LENGTHS) - 1]


def fast(directory: Path) -> Run:
    from engine.attention.triton import TritonAttention
    from engine.kernels.gpu.kernels import TritonKernels

    parallel = ParallelState(device=torch.device("cuda"))
    settings = {"kernels": TritonKernels(), "backend": TritonAttention(), "dtype": torch.bfloat16, "target": TINY}
    return Run(load(directory, parallel, **settings), parallel, page=16)


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_states_of_bfloat16_kernels(tmp_path, name):
    directory, data = write_draft(tmp_path, SHAPES[name]), texts(256)
    seen = []
    for run in (fast(directory), Run(load(directory, target=TINY), page=16)):
        rows = run.prefill(data, 7)
        batch = run.last_rows(LENGTHS)
        ids, hidden = run.drafter.predict(rows, batch, run.cache)
        after = run.last_rows(LENGTHS, 1)
        following = run.drafter.follow(hidden, torch.tensor([5, 17], device=run.device), after, run.cache)
        seen.append((hidden, following.x, run.drafter.predict(following, after, run.cache)[1]))
        assert ids.dtype == torch.int64 and int(ids.max()) < TINY.vocab_size
    for found, expected in zip(*seen, strict=True):
        assert relative_error(found.cpu(), expected) < 0.03


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_a_round_replays_as_one_graph(tmp_path, name):
    """Extend, three guesses: the same bits as without a graph, for inputs that the capture has not seen."""
    run, count = fast(write_draft(tmp_path, SHAPES[name])), 3
    assert run.drafter.is_capturable
    features, ids = run.inputs(texts(256), CHUNKS)
    all_rows, batches = run.batch(CHUNKS), [run.last_rows(LENGTHS, ahead) for ahead in range(count)]
    last_N = torch.tensor(LAST, device=run.device)

    def guess() -> tuple[torch.Tensor, DraftRows]:
        rows = run.drafter.extend(features, ids, all_rows, run.cache)
        places = iter(batches)
        rows_N = rows.select(last_N)
        return propose(run.drafter, rows_N, next(places), run.cache, count, lambda batch: next(places)), rows_N

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        guess()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_rows = guess()
    for seed in range(4):
        other_features, other_ids = run.inputs(texts(256, seed), CHUNKS)
        features.copy_(other_features)
        ids.copy_(other_ids)
        graph.replay()
        found, found_x = captured.clone(), captured_rows.x.clone()
        expected, expected_rows = guess()
        assert torch.equal(found, expected) and torch.equal(found_x, expected_rows.x)
