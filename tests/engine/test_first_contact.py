"""A first collective that does not end is found in time, with what to try."""

from __future__ import annotations

import threading

import pytest
import torch

from engine import first_contact
from engine.first_contact import within
from tests.processes import until

SECONDS = 20.0


@pytest.mark.parametrize(("device", "has_remedy"), [("cpu", False), ("cuda", True)])
def test_a_block_without_an_end_is_reported(device, has_remedy):
    said, called = [], threading.Event()

    def fail(reason: str) -> None:
        said.append(reason)
        called.set()

    with within(0.05, "the ranks did not meet", torch.device(device), fail):
        assert called.wait(SECONDS)
    assert said[0].startswith("the ranks did not meet within 0.05 s")
    assert ("NCCL_P2P_DISABLE=1" in said[0] and "ACS" in said[0]) == has_remedy


def test_a_block_that_ends_in_time_is_not():
    said = []
    for fail in (said.append, None):
        with within(SECONDS, "it", torch.device("cpu"), fail):
            pass
    until(lambda: not any(isinstance(t, threading.Timer) for t in threading.enumerate()), SECONDS, "no timer is left")
    assert not said


def test_a_wrong_sum_is_an_error(monkeypatch):
    monkeypatch.setattr(first_contact.dist, "all_reduce", lambda one: None)
    with pytest.raises(RuntimeError, match="over 2 ranks gave 1"):
        first_contact.first_all_reduce(torch.device("cpu"), 2, None)
