"""Whether the GPUs of a world reach each other's memory, and over what. GPU r of this host belongs to rank r."""

from __future__ import annotations

import importlib
import itertools

import torch

from engine.comm.parallel_state import ParallelState


def peer_obstacle(parallel: ParallelState) -> str | None:
    """Why the ranks' GPUs cannot read each other's memory, a clause, or None."""
    if parallel.device.type != "cuda":
        return f"runs on CUDA GPUs alone, not on {parallel.device.type}"
    available = torch.cuda.device_count()
    if parallel.tp > available:
        return f"needs all {parallel.tp} ranks on one host, but this one has {available} GPUs"
    for one, other in _pairs(parallel):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"needs peer access between GPUs, and GPU {one} has none to GPU {other}"
    return None


def nvlink_obstacle(parallel: ParallelState) -> str | None:
    """Why no NVLink joins every pair of the ranks' GPUs, a clause, or None; the driver's own word through NVML."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return "needs NVLink, which only NVML can tell of; install nvidia-ml-py"
    nvml.nvmlInit()
    try:
        for one, other in _pairs(parallel):
            if not _joined(nvml, one, other):
                return f"needs NVLink, and none joins GPU {one} and GPU {other}"
    finally:
        nvml.nvmlShutdown()
    return None


def _pairs(parallel: ParallelState):
    return itertools.permutations(range(parallel.tp), 2)


def _joined(nvml, one: int, other: int) -> bool:
    """By unique id, since NVML numbers all GPUs and CUDA those that are visible."""
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in (one, other)]
    handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    return nvml.nvmlDeviceGetP2PStatus(*handles, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK
