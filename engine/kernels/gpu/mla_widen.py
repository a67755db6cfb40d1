"""Tiles of float8_e4m3fn on their way to the tensor cores of compute capability 9.0, which take them as bfloat16."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its name before and since Triton 3.7
# Four float8_e4m3fn to bfloat16: their bits moved to where the wider type has them, times 2^120 for its exponent's
# bias. The compiler's own conversion goes by way of float16, one number at a time. NaN is not known here: a row that
# has one has it for a scale too.
_TO_BFLOAT16 = gl.constexpr(
    """{
    .reg .b32 a, b, c, d, bias;
    mov.b32 bias, 0x7b807b80;
    prmt.b32 a, 0, $2, 0x5140;
    prmt.b32 b, 0, $2, 0x7160;
    and.b32 c, a, 0x7f007f00;
    and.b32 d, b, 0x7f007f00;
    shr.b32 c, c, 4;
    shr.b32 d, d, 4;
    mul.bf16x2 c, c, bias;
    mul.bf16x2 d, d, bias;
    lop3.b32 $0, a, 0x80008000, c, 0xea;
    lop3.b32 $1, b, 0x80008000, d, 0xea;
    }"""
)


@gluon.jit
def widen_and_score(narrow, wide, rope, q_latent, q_rope, scores, C: gl.constexpr):
    """Starts the scores of a tile of float8_e4m3fn and leaves it as bfloat16: the tensor cores take a panel of columns
    while the next one is widened."""
    scores = warpgroup_mma(rope, q_rope.permute((1, 0)), scores, use_acc=False, is_async=True)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    for i in gl.static_range(C // 128):
        values = narrow.slice(i * 128, 128, dim=1).load(layout)
        values = gl.inline_asm_elementwise(_TO_BFLOAT16, "=r,=r,r", [values], wide.dtype, True, 4)
        panel = wide.slice(i * 128, 128, dim=1)
        panel.store(values)
        fence_async_shared()
        barrier()
        q_panel = q_latent.slice(i * 128, 128, dim=1)
        scores = warpgroup_mma(panel, q_panel.permute((1, 0)), scores, is_async=True)
    return scores
