"""Every way to hold experts, filled through its own specs from a whole checkpoint, against the plain experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.comm.parallel_state import ParallelState
from engine.kernels import reference
from engine.layers import quant
from engine.layers.quant import EXPERT_STORAGE, detect_storage
from engine.loading.weights import TensorHeader
from tests.checkpoints import pack_int4, quantize_int4

EXPERTS, WIDTH, INNER = 4, 64, 128


def tensors() -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """A checkpoint's tensors in all storages at once, and the dequantised whole: gate_up [E, 2I, D], down [E, D, I]."""
    generator, files, whole = torch.Generator().manual_seed(0), {}, {}
    for expert in range(EXPERTS):
        for name, shape in (("gate_proj", (INNER, WIDTH)), ("up_proj", (INNER, WIDTH)), ("down_proj", (WIDTH, INNER))):
            q, scale = quantize_int4(torch.randn(shape, generator=generator) / shape[1] ** 0.5)
            key = f"{expert}.{name}"
            whole[key] = reference.unpack_int4(pack_int4(q), scale)
            files |= {f"{key}.weight": whole[key], f"{key}.weight_packed": pack_int4(q), f"{key}.weight_scale": scale}
            files[f"{key}.weight_shape"] = torch.tensor(shape)
    gate_up = [torch.cat([whole[f"{e}.gate_proj"], whole[f"{e}.up_proj"]]) for e in range(EXPERTS)]
    return files, torch.stack(gate_up), torch.stack([whole[f"{e}.down_proj"] for e in range(EXPERTS)])


FILES, GATE_UP, DOWN = tensors()


def fill(storage: str, parallel: ParallelState, order=lambda names: names):
    experts = EXPERT_STORAGE[storage](EXPERTS, WIDTH, INNER, parallel, torch.float32)
    specs = experts.specs("")
    for name in order(list(specs)):
        spec = specs[name]
        assert tuple(FILES[name].shape) == spec.shape
        if spec.part is not None:
            spec.store(FILES[name][spec.part])
    return experts


@pytest.mark.parametrize("order", [list, lambda names: names[::-1], lambda names: sorted(names, key=lambda n: n[::-1])])
@pytest.mark.parametrize("storage", ["float", "int4"])
def test_one_rank_holds_the_whole_whatever_the_order_of_the_files(storage, order):
    experts = fill(storage, ParallelState(), order)
    assert torch.equal(experts.gate_up, GATE_UP) and torch.equal(experts.down, DOWN)


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("storage", ["float", "int4"])
def test_ranks_partials_sum_to_the_whole(storage, tp, ep):
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(9, WIDTH, generator=generator), torch.rand(9, 2, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(9)])
    total = torch.zeros(9, WIDTH)
    for rank in range(tp):
        experts = fill(storage, ParallelState(rank=rank, tp=tp, ep=ep))
        local = ids - experts.local.start
        total += experts(x, local.masked_fill((local < 0) | (local >= len(experts.local)), -1), weights)
    assert torch.allclose(total, reference.experts(x, ids, weights, GATE_UP, DOWN), atol=1e-5)


def test_a_weight_shape_that_disagrees_is_refused():
    specs = EXPERT_STORAGE["int4"](EXPERTS, WIDTH, INNER, ParallelState(), torch.float32).specs("x.")
    with pytest.raises(ValueError, match=r"says \[64, 128\]"):
        specs["x.2.up_proj.weight_shape"].store(torch.tensor([64, 128]))


def test_slices_that_cut_a_group_are_refused():
    with pytest.raises(ValueError, match="128 / 8 = 16"):
        EXPERT_STORAGE["int4"](EXPERTS, WIDTH, INNER, ParallelState(tp=8), torch.float32)
    with pytest.raises(ValueError, match="40"):
        EXPERT_STORAGE["int4"](EXPERTS, 40, INNER, ParallelState(), torch.float32).specs("")


def headers(*names: str, dtype: str = "BF16") -> dict[str, TensorHeader]:
    return {name: TensorHeader(Path("model.safetensors"), dtype, (2, 2)) for name in names}


def test_the_storage_is_told_by_the_tensors():
    assert detect_storage(headers("a.mlp.experts.0.up_proj.weight_packed", "a.norm.weight")) == "int4"
    assert detect_storage(headers("a.mlp.experts.0.up_proj.weight")) == "float"
    for stored in ("weight", "weight_packed"):
        with pytest.raises(ValueError, match="FP8"):
            detect_storage(headers(f"a.mlp.experts.0.up_proj.{stored}", "a.mlp.gate_proj.weight_scale_inv"))
    with pytest.raises(ValueError, match="FP8"):
        detect_storage(headers("a.mlp.experts.0.up_proj.weight", dtype="F8_E4M3"))


def test_packed_experts_hold_the_same_whatever_the_order_of_the_files():
    pytest.importorskip("triton")
    width, inner = 128, 256
    matrices = {}
    for parallel in (ParallelState(), ParallelState(rank=1, tp=2)):
        experts = EXPERT_STORAGE["packed_int4"](2, width, inner, parallel, torch.bfloat16)
        specs = experts.specs("")
        for name in sorted(specs, key=lambda n: n[::-1]):
            key, _, kind = name.rpartition(".")
            shape = (width, inner) if "down" in key else (inner, width)
            q, scale = matrices.setdefault(key, quantize_int4(torch.randn(shape)))
            whole = {"weight_packed": pack_int4(q), "weight_scale": scale, "weight_shape": torch.tensor(shape)}[kind]
            specs[name].store(whole[specs[name].part])
        gate_up, down = experts._kernels.expanded(experts.packed)
        for index in range(2):
            gate, up, out = (
                reference.unpack_int4(pack_int4(matrices[f"{index}.{n}_proj"][0]), scale.bfloat16()).bfloat16()
                for n in ("gate", "up", "down")
                for scale in (matrices[f"{index}.{n}_proj"][1],)
            )
            assert torch.equal(gate_up[index], torch.cat((gate[experts.columns], up[experts.columns])))
            assert torch.equal(down[index], out[:, experts.columns])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("inner", [96, 200 * 32])
def test_the_host_expands_as_the_reference_does(stored, held, inner):
    """To the last bit, of columns that are cut too, with fewer rows and more than it takes at once."""
    words = torch.randint(-(2**31), 2**31 - 1, (130, inner // 4), dtype=torch.int32)[:, : inner // 8]
    scale = torch.randn(130, inner // 32).to(stored)
    room = torch.zeros(130, inner, dtype=held)
    quant._expand_on_host(room, words, scale)
    assert torch.equal(room, reference.unpack_int4(words, scale).to(held))
