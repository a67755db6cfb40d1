"""Every Triton kernel through Triton's compiler and ptxas for every generation of GPU, without one."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from dataclasses import replace
from types import ModuleType

import pytest

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from engine.kernels import gpu
from engine.kernels.gpu import experts, mla_decode, sample, stream_read
from tests.triton_compile import compiled, registers

CAPABILITIES = [(9, 0), (10, 0), (12, 0)]
MODULES = {
    info.name: importlib.import_module(f"{gpu.__name__}.{info.name}") for info in pkgutil.iter_modules(gpu.__path__)
}


def cases(module: ModuleType, capability: tuple[int, int]) -> list[tuple]:
    """The module's, and those of settings that are not in use on every GPU."""
    found = module.compile_cases(capability)
    if module is mla_decode and capability == (9, 0):
        found += module.compile_cases(capability, replace(module.config_for(capability), hopper=True))[:1]
    return found


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", [name for name, module in MODULES.items() if hasattr(module, "compile_cases")])
def test_kernels_fit_a_block(name, capability, tmp_path):
    block_memory = (227 if capability[0] in (9, 10) else 99) * 1024
    for case in cases(MODULES[name], capability):
        kernel = compiled(case, capability)
        assert kernel.metadata.shared <= block_memory, case[0]
        used = registers(kernel, tmp_path)
        assert used <= 255 and used * 32 * kernel.metadata.num_warps <= 2**16, f"{case[0]} needs {used} registers"


def test_no_kernel_is_left_out():
    """A kernel is what no other jitted function calls."""
    functions = [
        value
        for module in MODULES.values()
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.module == module.__name__
    ]
    called = {id(callee) for function in functions for callee in callees(function)}
    kernels = {f"{f.module}.{f.fn.__qualname__}" for f in functions if id(f) not in called}
    tested = {
        f"{case[1].module}.{case[1].fn.__qualname__}"
        for module in MODULES.values()
        if hasattr(module, "compile_cases")
        for case in cases(module, (9, 0)) + cases(module, (12, 0))
    }
    assert len(kernels) > 15 and kernels == tested


def callees(function: JITFunction) -> list[JITFunction]:
    """The jitted functions that a jitted one names: calls, and what it hands to reductions."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    known = function.fn.__globals__
    found = [known.get(node.id) for node in ast.walk(tree) if isinstance(node, ast.Name)]
    found += [
        getattr(known.get(node.value.id), node.attr, None)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    return [value for value in found if isinstance(value, JITFunction) and value is not function]


def test_weights_reach_hoppers_matrix_units_through_registers():
    case = next(c for c in experts.compile_cases((9, 0)) if c[0] == "gate_up_kernel 256 2048")
    assembly = compiled(case, (9, 0)).asm
    assert "wgmma.mma_async" in assembly["ptx"] and "ldmatrix" in assembly["ptx"]
    loop = assembly["ttgir"].partition("scf.for")[2]
    dot = next(line for line in loop.splitlines() if "warp_group_dot " in line)
    assert re.search(r"tensor<128x\d+xbf16, #ttg.dot_op<{opIdx = 0", dot), "the weight went through shared memory"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_streaming_read_has_wide_loads(capability):
    for case in stream_read.compile_cases(capability):
        loads = case[3]["LOADS"]
        assert compiled(case, capability).asm["ptx"].count("ld.global.v4") >= loads, case[0]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_noise_has_logarithms_that_are_right_near_1(capability):
    for case in sample.compile_cases(capability):
        assert "lg2.approx" not in compiled(case, capability).asm["ptx"], case[0]
