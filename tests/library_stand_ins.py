"""Builds the dispatchers over optional libraries on stand-ins for those, without the questions they ask of a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from engine.comm.dispatcher import DispatchLimits, TokenDispatcher, dispatcher_class
from engine.comm.parallel_state import ParallelState
from tests import fake_deep_ep, fake_nccl_ep

NAMES = {"deepep Buffer": "deepep", "deepep ElasticBuffer": "deepep", "nccl_ep rank-major": "nccl_ep"}


def build(name: str, parallel: ParallelState, limits: DispatchLimits) -> TokenDispatcher:
    """For a process of its own: it stays that way."""
    torch.cuda.get_device_capability = lambda device: (9, 0)
    torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=0)
    if NAMES[name] == "deepep":
        fake_deep_ep.install(name.split()[1])
    else:
        fake_nccl_ep.install()
    return dispatcher_class(NAMES[name])(parallel, limits)


def alive() -> list:
    return fake_deep_ep.alive + fake_nccl_ep.alive
