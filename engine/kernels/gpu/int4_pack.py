"""From the checkpoint's INT4 words to the tiles of `engine.kernels.gpu.int4`, straight into their place, as one launch.

Weights arrive as tens of thousands of small matrices: what a load waits for is the launches between them. Twin:
`int4.pack_int4`, which the host uses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.int4 import GROUP_SIZE, GROUPS, TILE_COLUMNS, TILE_ROWS, WORDS, half_of_gate_up, pack_int4

HALF_ROWS = TILE_ROWS // 2  # of a tile that gate and up share: what each has of it


@triton.jit(
    do_not_specialize=["packed_stride", "scale_stride"], do_not_specialize_on_alignment=["packed_ptr", "scale_ptr"]
)
def _pack(
    packed_ptr, scale_ptr, words_ptr, scales_ptr, packed_stride, scale_stride, num_blocks, HALF: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One tile's rows that this matrix has. HALF: -1 all of them; 0 or 1: eight of each sixteen."""
    tile, block = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, ROWS)[:, None]
    w, g = tl.arange(0, WORDS)[None, :], tl.arange(0, GROUPS)[None, :]
    row = (tile * ROWS + r).to(tl.int64)
    packed = packed_ptr + row * packed_stride + block * (GROUPS * WORDS // 8) + w // 8
    out = tl.zeros((ROWS, WORDS), tl.int32)
    for group in tl.static_range(GROUPS):
        out |= ((tl.load(packed + group * (WORDS // 8)) >> (4 * (w % 8))) & 15) << (4 * group)
    placed = r if HALF < 0 else r // 8 * 16 + HALF * 8 + r % 8
    place = (tile * num_blocks + block) * (ROWS if HALF < 0 else 2 * ROWS) + placed
    tl.store(words_ptr + place * WORDS + w, out.to(tl.int16))
    scale = tl.load(scale_ptr + row * scale_stride + block * GROUPS + g)
    tl.store(scales_ptr + place * GROUPS + g, scale.to(tl.bfloat16))


def pack_into(
    words: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, half: int | None = None
) -> None:
    """Packs a matrix of the checkpoint, int32 [N, K/8] and float scales [N, K/32], into one expert's tiles, int16
    [tiles, K/128, 64, 32] and bfloat16 [tiles, K/128, 64, 4]. half: 0 for the gate, 1 for the up rows of tiles that
    both share, None where the tiles are the matrix's own. Rows may lie apart, of a row the columns may not.

    Raises ValueError for a matrix that is not whole tiles, or not those."""
    rows = TILE_ROWS if half is None else HALF_ROWS
    _check(words, packed, scale, rows)
    pack = _pack_on_host if words.device.type == "cpu" else launch
    pack(words, scales, packed.to(words.device), scale.to(words.device), half)


def launch(
    words: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, half: int | None
) -> None:
    """The kernel, for what `pack_into` has looked at."""
    rows, num_blocks = TILE_ROWS if half is None else HALF_ROWS, words.shape[1]
    _pack[(packed.shape[0] // rows, num_blocks)](
        packed, scale, words, scales, packed.stride(0), scale.stride(0), num_blocks,
        HALF=-1 if half is None else half, ROWS=rows, WORDS=WORDS, GROUPS=GROUPS, num_warps=4,
    )  # fmt: skip


def _check(words: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, rows: int) -> None:
    expected = words.shape[0] * rows, words.shape[1] * TILE_COLUMNS
    found = packed.shape[0], packed.shape[1] * 8
    if found != expected or tuple(scale.shape) != (found[0], found[1] // GROUP_SIZE):
        raise ValueError(
            f"tiles of {expected[0]} x {expected[1]} weights take no matrix of {found[0]} x {found[1]} with scales "
            f"{list(scale.shape)}; pass a rank's whole part."
        )
    if packed.stride(1) != 1 or scale.stride(1) != 1:
        packed_stride, scale_stride = packed.stride(), scale.stride()
        raise ValueError(
            f"columns must lie together, not at strides {packed_stride} and {scale_stride}; copy the matrix."
        )


def _pack_on_host(
    words: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, half: int | None
) -> None:
    if half is None:
        for target, value in zip((words, scales), pack_int4(packed, scale), strict=True):
            target.copy_(value)
        return
    for target, value in zip((words, scales), pack_int4(packed, scale, HALF_ROWS), strict=True):
        half_of_gate_up(target, bool(half)).copy_(value.unflatten(2, (4, 8)))


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options): a matrix of its own tiles, and one that shares them."""
    signature = {"packed_ptr": "*i32", "scale_ptr": "*bf16", "words_ptr": "*i16", "scales_ptr": "*bf16"}
    signature |= dict.fromkeys(("packed_stride", "scale_stride", "num_blocks"), "i32")
    shape = {"WORDS": WORDS, "GROUPS": GROUPS}
    return [
        ("int4_pack", _pack, signature, shape | {"HALF": -1, "ROWS": TILE_ROWS}, {"num_warps": 4}),
        ("int4_pack_half", _pack, signature, shape | {"HALF": 1, "ROWS": HALF_ROWS}, {"num_warps": 4}),
    ]
