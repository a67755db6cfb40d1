"""What the dispatchers over peer memory open on a GPU, with an Exchange that opens nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.comm import exchange
from engine.comm.dispatch_symm import SymmReplicatedDispatcher, SymmScatterDispatcher
from engine.comm.dispatcher import DispatchLimits
from engine.comm.parallel_state import ParallelState

LIMITS = DispatchLimits(8, 16, 2, 100, torch.bfloat16)


class Opened:
    def __init__(self, parallel, limits):
        self.said = []
        self.late = None

    def one_shot_channel(self):
        self.said.append("one shot")
        return SimpleNamespace(shape=SimpleNamespace(capacity=64))

    def two_shot_channel(self):
        self.said.append("two shots")
        return SimpleNamespace(shape=SimpleNamespace(capacity=10))

    def ready(self):
        self.said.append("ready")

    def failure(self):
        return self.late

    def close(self):
        self.said.append("closed")


@pytest.fixture(autouse=True)
def gpu_ranks_without_gpus(monkeypatch):
    monkeypatch.setattr(exchange, "Exchange", Opened)
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "nccl")


@pytest.mark.parametrize(
    ("cls", "channel"), [(SymmReplicatedDispatcher, "one shot"), (SymmScatterDispatcher, "two shots")]
)
def test_one_channel_is_opened_then_all_are_ready(cls, channel):
    one = cls(ParallelState(0, 2, 2, torch.device("cuda", 0)), LIMITS)
    opened = one._exchange
    assert opened.said == [channel, "ready"] and one.is_capturable and one.failure() is None
    opened.late = "rows of rank 1 did not arrive within 15 s"
    assert one.failure() == opened.late
    one.close()
    assert opened.said[-1] == "closed"


def test_rows_are_cut_by_the_channel_on_a_gpu_and_go_at_a_time_elsewhere():
    on_gpu = SymmScatterDispatcher(ParallelState(0, 2, 2, torch.device("cuda", 0)), LIMITS)
    on_cpu = SymmScatterDispatcher(ParallelState(0, 2, 2), LIMITS)
    assert len(on_gpu._rounds(25).pieces) == 3 and len(on_cpu._rounds(2500).pieces) == 1
    assert on_gpu.is_capturable and not on_cpu.is_capturable
