"""Dispatchers over `deep_ep` and `nccl.ep`: on stand-ins for those at 2 and 4 ranks, and every refusal."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from engine.comm import peers
from engine.comm.dispatch_deepep import DeepEpDispatcher
from engine.comm.dispatch_nccl_ep import NcclEpDispatcher
from engine.comm.dispatcher import DispatchLimits, build
from engine.comm.parallel_state import ParallelState
from tests import fake_deep_ep, fake_nccl_ep, library_stand_ins
from tests.dispatch_world import NUM_DENSE, NUM_LAYERS, NUM_MOE, TOP, WIDTH, Case, run, run_world

FEW, MANY = 8, 300
TIE = 2**-8  # a score below 1 in bfloat16
ROWS = ((1, 0), (3, 0), (8, 0), (17, 0), (8, 5), (MANY, 0))
LIMITS = DispatchLimits(num_experts=8, width=64, top_k=3, max_tokens=64, dtype=torch.bfloat16)
TWO_GPUS = ParallelState(0, 2, 2, torch.device("cuda", 0))
CLASSES = (DeepEpDispatcher, NcclEpDispatcher)


def cases_of(name: str, tp: int) -> list[Case]:
    return [
        Case(name, tp, num_tokens, routing, torch.bfloat16, padding)
        for num_tokens, padding in ROWS
        for routing in ("any", "few")
    ]


@pytest.fixture(scope="module", params=(2, 4), ids=lambda tp: f"{tp} ranks")
def world(request, tmp_path_factory):
    tp = request.param
    cases = [case for name in (*library_stand_ins.NAMES, "nccl_agrs") for case in cases_of(name, tp)]
    outcomes = run_world(tp, tmp_path_factory.mktemp("world"), cases)
    return tp, dict(zip(cases, outcomes, strict=True))


@pytest.mark.parametrize("name", library_stand_ins.NAMES)
def test_all_ranks_compute_what_one_rank_does(world, name):
    """Every row, but for those whose routing is a tie within bfloat16's rounding, which may fall the other way."""
    for case, outcomes in world[1].items():
        if case.dispatcher == name and case.num_tokens <= FEW:
            with torch.inference_mode():
                expected = run(replace(case, dispatcher="reference", ep=1))
            clear = expected.margin[: case.num_real] > TIE
            assert clear.sum() >= case.num_real - 1, "hardly a row is a tie"
            real = slice(0, case.num_real)
            for outcome in outcomes:
                assert torch.allclose(outcome.x[real][clear].float(), expected.x[real][clear].float(), atol=0.1), case


@pytest.mark.parametrize("name", library_stand_ins.NAMES)
def test_rows_without_a_partial_change_no_bit(world, name):
    """Where `nccl_agrs` adds zeros of ranks that hold none of a row's experts, nothing is added here."""
    for case, outcomes in world[1].items():
        if case.dispatcher == name:
            expected = world[1][replace(case, dispatcher="nccl_agrs")][0]
            assert all(torch.equal(o.x[: case.num_real], expected.x[: case.num_real]) for o in outcomes), case
            assert all(torch.equal(o.x, outcomes[0].x) for o in outcomes), case


@pytest.mark.parametrize("name", library_stand_ins.NAMES)
def test_every_pair_is_computed_once_and_no_padding(world, name):
    for case, outcomes in world[1].items():
        if case.dispatcher == name:
            assert sum(o.num_pairs for o in outcomes) == case.num_real * TOP * NUM_MOE, case


@pytest.mark.parametrize("name", library_stand_ins.NAMES)
def test_rounds_and_the_most_bytes(world, name):
    tp, results = world
    for case, outcomes in results.items():
        if case.dispatcher == name:
            rows = (tp - 1) * -(-case.num_tokens // tp)
            expected = {
                "attention_reduce": (NUM_LAYERS, NUM_LAYERS * rows * WIDTH * 2),
                "moe_dispatch": (NUM_MOE, NUM_MOE * rows * (WIDTH * 2 + TOP * 12)),
                "moe_combine": (NUM_LAYERS, NUM_LAYERS * 2 * rows * WIDTH * 2),
                "other": (NUM_DENSE, NUM_DENSE * rows * WIDTH * 2),
            }
            for outcome in outcomes:
                counted = {kind: (outcome.rounds[kind], outcome.bytes[kind]) for kind in expected}
                assert counted == expected, case


@pytest.fixture
def host(monkeypatch):
    """Two H200 on NVLink, with both libraries; a test takes away what it is about."""
    told = SimpleNamespace(gpus=2, capability=(9, 0), access=True, nvlink=True, nccl=(2, 30, 7))
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "device_count", lambda: told.gpus)
    monkeypatch.setattr(cuda, "get_device_capability", lambda device=None: told.capability)
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda one, other: told.access)
    monkeypatch.setattr(cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    monkeypatch.setattr(cuda.nccl, "version", lambda: told.nccl)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(told))
    for name in ("deep_ep", "nccl", "nccl.ep", "nccl.ep.interop", "nccl.ep.interop.torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    fake_deep_ep.install("Buffer")
    fake_nccl_ep.install()
    return told


def fake_nvml(told: SimpleNamespace) -> ModuleType:
    nvml = ModuleType("pynvml")
    nvml.NVML_P2P_CAPS_INDEX_NVLINK, nvml.NVML_P2P_STATUS_OK = 2, 0
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlDeviceGetP2PStatus = lambda one, other, index: 0 if told.nvlink and one != other else 5
    return nvml


@pytest.mark.parametrize("kind", CLASSES)
def test_nothing_is_in_the_way_on_such_a_host(host, kind):
    assert kind.obstacle(TWO_GPUS, LIMITS) is None


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("parallel", "limits", "words"),
    [
        ({"tp": 1, "ep": 1}, {}, "no other rank"),
        ({"is_share": True}, {}, "no other rank"),
        ({"ep": 1}, {}, "needs ep=2 with tp=2, not ep=1"),
        ({}, {"dtype": torch.float32}, "carries bfloat16, not float32"),
        ({}, {"top_k": 33}, "at most 32 experts a row, and the model has 33"),
        ({}, {"width": 60}, "multiple of 16 bytes, not 120"),
        ({"device": torch.device("cpu")}, {}, "runs on CUDA GPUs alone, not on cpu"),
        ({"tp": 4, "ep": 4}, {}, "needs all 4 ranks on one host, but this one has 2 GPUs"),
    ],
)
def test_what_the_world_or_the_model_rule_out(host, kind, parallel, limits, words):
    reason = kind.obstacle(replace(TWO_GPUS, **parallel), replace(LIMITS, **limits))
    assert reason is not None and words in reason


@pytest.mark.parametrize("kind", CLASSES)
def test_gpus_that_do_not_reach_each_other(host, kind):
    host.access = False
    assert "peer access between GPUs, and GPU 0 has none to GPU 1" in kind.obstacle(TWO_GPUS, LIMITS)


@pytest.mark.parametrize("interface", ["Buffer", "ElasticBuffer"])
def test_deep_ep_needs_nvlink_and_nccl_ep_does_not(host, interface):
    fake_deep_ep.install(interface)
    host.nvlink = False
    assert "none joins GPU 0 and GPU 1" in DeepEpDispatcher.obstacle(TWO_GPUS, LIMITS)
    assert NcclEpDispatcher.obstacle(TWO_GPUS, LIMITS) is None


def test_nvlink_is_not_taken_for_granted_without_nvml(host, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "install nvidia-ml-py" in peers.nvlink_obstacle(TWO_GPUS)


def test_the_buffer_is_not_built_for_compute_capability_12(host):
    host.capability = (12, 0)
    reason = DeepEpDispatcher.obstacle(TWO_GPUS, LIMITS)
    assert "compute capabilities 9 and 10, not 12.0" in reason and "no ElasticBuffer" in reason


def test_the_buffer_serves_2_4_and_8_ranks(host):
    host.gpus = 6
    reason = DeepEpDispatcher.obstacle(replace(TWO_GPUS, tp=6, ep=6), LIMITS)
    assert "2, 4 or 8 ranks, not 6" in reason


def test_the_elastic_buffer_serves_where_the_other_cannot(host):
    host.gpus, host.capability = 6, (12, 0)
    fake_deep_ep.install("ElasticBuffer")
    assert DeepEpDispatcher.obstacle(replace(TWO_GPUS, tp=6, ep=6), LIMITS) is None
    host.capability = (8, 9)
    assert "from compute capability 9 on, not for 8.9" in DeepEpDispatcher.obstacle(TWO_GPUS, LIMITS)


def test_a_deep_ep_of_neither_interface(host, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    reason = DeepEpDispatcher.obstacle(TWO_GPUS, LIMITS)
    assert "no Buffer" in reason and "no ElasticBuffer" in reason


def test_an_elastic_buffer_that_fails_names_the_usual_remedy(host, monkeypatch):
    module = ModuleType("deep_ep")

    def fail(*arguments, **settings):
        raise RuntimeError("GIN\n is not there")

    module.ElasticBuffer = fail
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    monkeypatch.setattr("engine.comm.sharded_rows.are_capturable", lambda _: True)  # asks torch about the group
    group = SimpleNamespace(size=lambda: 2)
    with pytest.raises(RuntimeError, match=r"GIN is not there\); .* set EP_DISABLE_GIN=1\.$"):
        DeepEpDispatcher(replace(TWO_GPUS, group=group), LIMITS)


def test_an_old_nccl(host):
    host.nccl = (2, 28, 9)
    assert "needs NCCL 2.29.2 or newer, and this torch has 2.28.9" in NcclEpDispatcher.obstacle(TWO_GPUS, LIMITS)


@pytest.mark.parametrize(
    ("kind", "module", "words"),
    [(DeepEpDispatcher, "deep_ep", "package deep_ep"), (NcclEpDispatcher, "nccl.ep", "package nccl-extensions")],
)
def test_a_package_that_is_not_installed(host, monkeypatch, kind, module, words):
    monkeypatch.setitem(sys.modules, module, None)
    assert words in kind.obstacle(TWO_GPUS, LIMITS)


@pytest.mark.parametrize("name", ["deepep", "nccl_ep"])
def test_what_is_named_is_refused_in_one_sentence(name):
    with pytest.raises(ValueError, match=f"moe_comm='{name}' runs on CUDA GPUs alone, not on cpu; use one of the oth"):
        build(name, replace(TWO_GPUS, device=torch.device("cpu")), LIMITS)
