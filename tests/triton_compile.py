"""Compiles Triton and Gluon kernels for a GPU that is not there, with the arguments' alignment that launches have."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon._runtime import GluonASTSource

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(case: tuple, capability: tuple[int, int]):
    """case: (name, kernel, signature, constants, options), an entry of a module's compile_cases."""
    _, kernel, signature, constants, options = case
    signature = {argument: signature.get(argument, "constexpr") for argument in kernel.arg_names}
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in constants]
    assert not missing, f"{case[0]} gives neither a type nor a value for {missing}"
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (param, kind) in enumerate(zip(kernel.params, signature.values(), strict=True))
        if kind.startswith("*") and not param.do_not_specialize_on_alignment
    }
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    return compile(source(kernel, signature, constants, aligned), target=target, options=options)


def registers(kernel, folder: Path) -> int:
    """Registers of a thread, as the assembler left them in the binary."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    command = [_CUOBJDUMP, "--dump-resource-usage", binary]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", usage)[1])
