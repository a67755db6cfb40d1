"""INT4 weights (group 32, symmetric, nibble = q + 8) in the order in which the expert kernels read them.

A matrix [N, K] is cut into tiles of 64 rows by 128 columns, each 4 KB of words and 512 bytes of scales in one piece, a
row of tiles after the other: a program that walks along K reads memory in a straight line. Word w of a row of a tile
(w < 32) holds in nibble j column 32 j + w, so that nibble j of all words is scale group j and a register with two
neighbouring words gives two neighbouring columns of each group without any shuffle.

Shape letters: E experts, N rows, K columns, B column blocks of 128, G scale groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_ROWS = 64
TILE_COLUMNS = 128
GROUP_SIZE = 32
WORDS = 32
GROUPS = 4

_DEQUANTISE = tl.constexpr("""
    {
    .reg .b32 a, b, c, d, z;
    mov.b32 z, 0x43084308;
    shr.u32 b, $4, 4;
    shr.u32 c, $4, 8;
    shr.u32 d, $4, 12;
    lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 a, a, z;
    sub.rn.bf16x2 b, b, z;
    sub.rn.bf16x2 c, c, z;
    sub.rn.bf16x2 d, d, z;
    mul.rn.bf16x2 $0, a, $5;
    mul.rn.bf16x2 $1, b, $6;
    mul.rn.bf16x2 $2, c, $7;
    mul.rn.bf16x2 $3, d, $8;
    }
    """)

_CENTRED = tl.constexpr("""
    {
    .reg .b32 b, c, d;
    shr.u32 b, $4, 4;
    shr.u32 c, $4, 8;
    shr.u32 d, $4, 12;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $2, c, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, d, 0x000F000F, 0x43004300, 0xEA;
    }
    """)


def pack_int4(
    packed: torch.Tensor, scale: torch.Tensor, tile_rows: int = TILE_ROWS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words int16 [N/64, K/128, 64, 32] and scales bfloat16 [N/64, K/128, 64, 4] of a pack-quantized matrix.

    packed: int32 [N, K/8], eight columns a word, lowest nibble = lowest column; scale: [N, K/32]. N must be a multiple
    of `tile_rows` (64) and K of 128. Runs on the tensors' device.
    """
    rows, columns = packed.shape[0], packed.shape[1] * 8
    if rows % tile_rows or columns % TILE_COLUMNS:
        raise ValueError(
            f"packed experts need a multiple of {tile_rows} rows and of {TILE_COLUMNS} columns, "
            f"not {rows} x {columns}; use the float storage."
        )
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    q_NBGW = ((packed.unsqueeze(-1) >> shifts) & 15).view(rows, -1, GROUPS, WORDS)
    words = q_NBGW[:, :, 0] | q_NBGW[:, :, 1] << 4 | q_NBGW[:, :, 2] << 8 | q_NBGW[:, :, 3] << 12
    words = torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)
    return _tiled(words, tile_rows), _tiled(scale.to(torch.bfloat16).view(rows, -1, GROUPS), tile_rows)


def _tiled(x_NBW: torch.Tensor, tile_rows: int) -> torch.Tensor:
    return x_NBW.unflatten(0, (-1, tile_rows)).transpose(1, 2).contiguous()


def half_of_gate_up(tiles: torch.Tensor, is_up: bool) -> torch.Tensor:
    """View [I/32, K/128, 4, 8, X] of the gate or the up rows in one expert's interleaved tiles [2I/64, K/128, 64, X].

    Eight rows of gate and eight of up alternate: both rows of a pair then lie in one thread's part of a product.
    """
    return tiles.unflatten(2, (4, 2, 8))[:, :, :, int(is_up)]


def unpack_tiles(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The bfloat16 matrix [N, K] that the kernels multiply by: (nibble - 8) * scale, rounded once."""
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)
    q = ((words.to(torch.int32).unsqueeze(-2) >> shifts.unsqueeze(-1)) & 15) - 8
    weight = (q * scales.float().unsqueeze(-1)).to(torch.bfloat16)
    return weight.flatten(-2).transpose(1, 2).flatten(2).flatten(0, 1)


@triton.jit
def _dequantise(words, s0, s1, s2, s3, ASM: tl.constexpr):
    """Four bfloat16 tiles like `words`, one a nibble: 0x4300 | nibble is 128 + nibble, so minus 136 is exact."""
    if ASM:
        return tl.inline_asm_elementwise(
            _DEQUANTISE,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, s0, s1, s2, s3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    bits = words.to(tl.int32)
    return (
        (((bits & 15) - 8).to(tl.float32) * s0.to(tl.float32)).to(tl.bfloat16),
        ((((bits >> 4) & 15) - 8).to(tl.float32) * s1.to(tl.float32)).to(tl.bfloat16),
        ((((bits >> 8) & 15) - 8).to(tl.float32) * s2.to(tl.float32)).to(tl.bfloat16),
        ((((bits >> 12) & 15) - 8).to(tl.float32) * s3.to(tl.float32)).to(tl.bfloat16),
    )


@triton.jit
def tile_offsets(BN: tl.constexpr, K_BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets [BN, WIDTH] of the rows of one or more tiles below each other, at column block 0."""
    n = tl.arange(0, BN)
    rows = (n // 64) * (K_BLOCKS * 64 * WIDTH) + (n % 64) * WIDTH
    return rows[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def dequantised_tile(words, scales, BN: tl.constexpr, ASM: tl.constexpr):
    """bfloat16 [BN, 128] of words int16 [BN, 32] and scales [BN, 4]; all in registers."""
    s02, s13 = tl.split(tl.reshape(scales, (BN, 2, 2)))
    s0, s2 = tl.split(s02)
    s1, s3 = tl.split(s13)
    w0, w1, w2, w3 = _dequantise(
        words,
        tl.broadcast_to(s0[:, None], (BN, 32)),
        tl.broadcast_to(s1[:, None], (BN, 32)),
        tl.broadcast_to(s2[:, None], (BN, 32)),
        tl.broadcast_to(s3[:, None], (BN, 32)),
        ASM,
    )
    pairs = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # [BN, 32, low bit of the group, high bit]
    return tl.reshape(tl.permute(pairs, (0, 3, 2, 1)), (BN, 128))


@triton.jit
def multiply(a, b, acc, ASM: tl.constexpr):
    """acc + a . b; the interpreter holds bfloat16 as integers and multiplies those, so it gets floats."""
    if ASM:
        return tl.dot(a, b, acc)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)


@triton.jit
def _nibbles(words, ASM: tl.constexpr):
    """Four bfloat16 tiles like `words`, one a nibble: q + 136 exactly, without the assembly q."""
    if ASM:
        return tl.inline_asm_elementwise(
            _CENTRED,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    bits = words.to(tl.int32)
    return (
        ((bits & 15) - 8).to(tl.float32).to(tl.bfloat16),
        (((bits >> 4) & 15) - 8).to(tl.float32).to(tl.bfloat16),
        (((bits >> 8) & 15) - 8).to(tl.float32).to(tl.bfloat16),
        (((bits >> 12) & 15) - 8).to(tl.float32).to(tl.bfloat16),
    )


@triton.jit
def _group_product(nibbles, scale, x, acc, BN: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr):
    """acc + scale * (q . x) for the 32 columns of a group; -136 for each of x's is summed by the matrix unit too."""
    product = tl.zeros((BN, ROWS), tl.float32)
    if ASM:
        product = tl.dot(tl.full((BN, 32), -136.0, tl.bfloat16), x, product)
    product = multiply(nibbles, x, product, ASM)
    return acc + scale.to(tl.float32)[:, None] * product


@triton.jit
def grouped_step(words, scales, x_tile, acc, BN: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr):
    """acc + W[BN, 128] . x[128, ROWS] of words [BN, 32] and scales [BN, 4]: a group's sum is scaled, not its weights.

    x_tile: pointers [32, ROWS] to the first group's x. With ROWS = 8 a quarter fewer instructions than with scaled
    weights, and instructions are what this loop is bound by.
    """
    x0 = tl.load(x_tile)
    x1 = tl.load(x_tile + 32)
    x2 = tl.load(x_tile + 64)
    x3 = tl.load(x_tile + 96)
    w0, w1, w2, w3 = _nibbles(words, ASM)
    s02, s13 = tl.split(tl.reshape(scales, (BN, 2, 2)))
    s0, s2 = tl.split(s02)
    s1, s3 = tl.split(s13)
    acc = _group_product(w0, s0, x0, acc, BN, ROWS, ASM)
    acc = _group_product(w1, s1, x1, acc, BN, ROWS, ASM)
    acc = _group_product(w2, s2, x2, acc, BN, ROWS, ASM)
    return _group_product(w3, s3, x3, acc, BN, ROWS, ASM)


@triton.jit
def int4_product(
    words_ptr, scales_ptr, x_ptr, x_offsets, first_block,
    K_BLOCKS: tl.constexpr, STEPS: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    GROUPED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """float32 [BN, ROWS] = W[BN, STEPS * 128] . x^T from column block `first_block` on.

    words_ptr, scales_ptr: the first tile of the BN rows; x_offsets: [ROWS], where each row of x starts. The weight
    takes the side of the MMA whose tile is never smaller than 64.
    """
    acc = tl.zeros((BN, ROWS), tl.float32)
    word_offsets = tile_offsets(BN, K_BLOCKS, 32)
    scale_offsets = tile_offsets(BN, K_BLOCKS, 4)
    x_tile = x_offsets[None, :] + tl.arange(0, 32 if GROUPED else 128)[:, None]
    words_ptr += first_block * 2048
    scales_ptr += first_block * 256
    x_ptr += first_block * 128
    for k in tl.range(0, STEPS, num_stages=STAGES):
        words = tl.load(words_ptr + k * 2048 + word_offsets)
        scales = tl.load(scales_ptr + k * 256 + scale_offsets)
        if GROUPED:
            acc = grouped_step(words, scales, x_ptr + k * 128 + x_tile, acc, BN, ROWS, ASM)
        else:
            x = tl.load(x_ptr + k * 128 + x_tile)
            acc = multiply(dequantised_tile(words, scales, BN, ASM), x, acc, ASM)
    return acc
