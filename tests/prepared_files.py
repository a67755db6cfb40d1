"""A small set of tensors, its prepared file, and what lies beside it."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.loading.prepared.weights import Preparation, PreparedWeights

KEY = {"tp": 2, "rank": 1, "source": "abc"}
NAME = "rank-1.prepared"


def tensors(seed: int | None = 0) -> dict[str, torch.Tensor]:
    """Of several types, longer than a block, at odd sizes, empty; zeros without a seed."""
    generator = torch.Generator().manual_seed(seed or 0)
    made = {
        "wide": torch.randn(33, 257, generator=generator),
        "short": torch.randn(5, generator=generator).to(torch.bfloat16),
        "words": torch.randint(-(2**15), 2**15, (3, 64, 32), generator=generator).to(torch.int16),
        "bytes": torch.randint(0, 256, (9001,), generator=generator).to(torch.uint8),
        "none": torch.empty(0, 4),
        "one": torch.randn((), generator=generator),
    }
    return made if seed is not None else {name: torch.zeros_like(tensor) for name, tensor in made.items()}


def prepared(
    directory: Path, values: dict[str, torch.Tensor], most_seconds: float = 60.0, **changes
) -> PreparedWeights:
    return PreparedWeights(Preparation(str(directory), most_seconds), NAME, lambda: KEY | changes, values)


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one | other)


def left(directory: Path) -> list[str]:
    """All that lies there but the lock."""
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith(".lock"))


def flip(file: Path, offset: int) -> None:
    """One bit of the byte there."""
    with open(file, "r+b") as stream:
        stream.seek(offset)
        (old,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([old ^ 16]))
