"""The INT4 expert kernels through Triton's compiler and ptxas, for every generation of GPU, without one."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.gpu import experts, experts_plan


def compiled(case: tuple, capability: tuple[int, int]):
    _, kernel, signature, constants, options = case
    signature = {a: signature.get(a, "constexpr") for a in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    return compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("module", [experts, experts_plan])
def test_kernels_fit(module, capability):
    limit = (227 if capability[0] in (9, 10) else 99) * 1024
    for case in module.compile_cases(capability):
        assert compiled(case, capability).metadata.shared <= limit, case[0]


def test_weights_reach_hoppers_matrix_units_through_registers():
    case = next(c for c in experts.compile_cases((9, 0)) if c[0] == "gate_up_kernel 256 2048")
    assembly = compiled(case, (9, 0)).asm
    assert "wgmma.mma_async" in assembly["ptx"] and "ldmatrix" in assembly["ptx"]
    loop = assembly["ttgir"].partition("scf.for")[2]
    dot = next(line for line in loop.splitlines() if "warp_group_dot " in line)
    assert re.search(r"tensor<\d+x\d+xbf16, #ttg.dot_op<{opIdx = 0", dot), "the weight went through shared memory"


@pytest.mark.parametrize("inner", [256, 2048])
def test_a_few_rows_products_keep_weights_in_registers(inner):
    for name in (f"gate_up_kernel {inner} 16", f"down_kernel {inner} 16"):
        case = next(c for c in experts.compile_cases((9, 0)) if c[0] == name)
        graph = compiled(case, (9, 0)).asm["ttgir"]
        weight = re.compile(r"ttg.local_alloc %.*tensor<128x(32|128)xbf16")
        assert "tt.dot" in graph and not weight.search(graph), name
