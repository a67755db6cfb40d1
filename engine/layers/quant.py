"""How routed experts hold their weights: pack-quantized INT4 or plain floats, both behind one constructor.

Shape letters: E this rank's experts, D model width, I this rank's columns of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.comm.parallel_state import ParallelState
from engine.kernels import reference
from engine.layers.parameter import FLOAT_TYPES, WHOLE, empty
from engine.loading.weights import TensorHeader, TensorSpec

GROUP_SIZE = 32
_HOST_ROWS = 64  # of a matrix that the host expands at once
PACKED_COLUMNS = 128  # columns of a packed tile
MATRICES = ("gate_proj", "up_proj", "down_proj")
_Store = Callable[[torch.Tensor], None]
_Sink = Callable[[torch.Tensor, torch.Tensor], None]


class FloatExperts(nn.Module):
    """Experts as dense matrices of the engine's dtype: gate_up [E, 2I, D] with gate rows first, down [E, D, I]."""

    group_size = 1
    is_capturable = False
    in_parts = False  # whether few rows may come as parts of a sum, for which every row needs all its experts here

    def __init__(self, num_experts: int, width: int, expert_width: int, parallel: ParallelState, dtype: torch.dtype):
        super().__init__()
        self.num_experts, self.width, self.expert_width = num_experts, width, expert_width
        self.local = parallel.expert_range(num_experts)
        self.columns = parallel.expert_columns(expert_width, self.group_size)
        size = self.columns.stop - self.columns.start
        count = len(self.local)
        self.gate_up = empty(count, 2 * size, width, dtype=dtype, device=parallel.device)
        self.down = empty(count, width, size, dtype=dtype, device=parallel.device)

    def forward(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        shared_act_TI: torch.Tensor | None = None,
        shared_down_DI: torch.Tensor | None = None,
        plan: Any = None,
    ) -> torch.Tensor:
        """Weighted sum of the local experts of each row (id -1 = none), float32 [T, D], partial over ranks.

        Where the shared expert's activation and down matrix are given, their product is added. plan: what the router
        found out for these rows, if anything.
        """
        return reference.experts(x_TD, ids_TK, weights_TK, self.gate_up, self.down, shared_act_TI, shared_down_DI)

    def specs(self, prefix: str, slots: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        """Keys are prefix + "{expert}.{gate,up,down}_proj" + what the storage adds; all ranks' experts are listed.

        slots: the checkpoint's expert in each place, None where each is in its own.
        """
        specs: dict[str, TensorSpec] = {}
        here, elsewhere = ({name: self._wanted(name, is_here) for name in MATRICES} for is_here in (True, False))
        for slot, expert in enumerate(slots or range(self.num_experts)):
            for name in MATRICES:
                matrix = f"{prefix}{expert}.{name}"
                if slot not in self.local:  # one spec serves all experts of other ranks
                    for ending, spec in elsewhere[name].items():
                        specs[f"{matrix}.{ending}"] = spec
                    continue
                stores = self._stores(name, slot - self.local.start)
                for (ending, spec), store in zip(here[name].items(), stores, strict=True):
                    specs[f"{matrix}.{ending}"] = spec._replace(store=store)
        return specs

    def _wanted(self, name: str, is_here: bool) -> dict[str, TensorSpec]:
        """How a matrix's name goes on -> what is wanted of that tensor, the store left open."""
        part = self._part(name, self.columns) if is_here else None
        return {
            "weight": TensorSpec(self._shape(name), FLOAT_TYPES, part, _nothing, **self._sharing(name)),
        }

    def _stores(self, name: str, index: int) -> tuple[_Store, ...]:
        """Of the tensors of `_wanted`; index: of the expert among this rank's."""

        def store(value: torch.Tensor) -> None:
            self._room(name, index).copy_(value)

        return (store,)

    def _room(self, name: str, index: int) -> torch.Tensor:
        """Where a matrix goes; looked up when it comes, since a view of each beforehand would take seconds."""
        if name == "down_proj":
            return self.down[index]
        return self.gate_up[index].chunk(2)[name == "up_proj"]

    def _sharing(self, name: str) -> dict[str, bool]:
        """Which other ranks read this matrix's rows: those that have the same experts, and each its columns of them."""
        is_cut = name == "down_proj" and self.columns.stop - self.columns.start < self.expert_width
        has_all = len(self.local) == self.num_experts
        return {"is_everywhere": name == "down_proj" and has_all, "is_in_group": is_cut and not has_all}

    def _part(self, name: str, columns: slice) -> tuple[slice, ...]:
        return (WHOLE, columns) if name == "down_proj" else (columns, WHOLE)

    def _shape(self, name: str) -> tuple[int, int]:
        return (self.width, self.expert_width) if name == "down_proj" else (self.expert_width, self.width)


class Int4Experts(FloatExperts):
    """Pack-quantized experts (group 32, symmetric), expanded to the engine's dtype while they are read."""

    group_size = GROUP_SIZE

    def _wanted(self, name: str, is_here: bool) -> dict[str, TensorSpec]:
        out, width = self._shape(name)
        if width % GROUP_SIZE:
            raise ValueError(f"{width} input columns of an expert are not whole groups of {GROUP_SIZE}.")
        words = scales = shape = None
        sharing = self._sharing(name)
        if is_here:
            is_down = name == "down_proj"
            words, scales = (
                self._part(name, _divided(self.columns, by) if is_down else self.columns) for by in (8, GROUP_SIZE)
            )
            shape = (WHOLE,)
        return {
            "weight_packed": TensorSpec((out, width // 8), ("I32",), words, _nothing, **sharing),
            "weight_scale": TensorSpec((out, width // GROUP_SIZE), FLOAT_TYPES, scales, _nothing, **sharing),
            "weight_shape": TensorSpec((2,), ("I32", "I64"), shape, _nothing, on_host=True),
        }

    def _stores(self, name: str, index: int) -> tuple[_Store, ...]:
        unpacker = _Unpacker(self._shape(name), self._sink(name, index))
        return unpacker.packed, unpacker.scale, unpacker.shape

    def _sink(self, name: str, index: int) -> _Sink:
        """What takes a weight's words and scales once both are read."""

        def expand(packed: torch.Tensor, scale: torch.Tensor) -> None:
            room = self._room(name, index)
            if room.device.type == "cpu":
                _expand_on_host(room, packed, scale)
            else:
                room.copy_(reference.unpack_int4(packed, scale, GROUP_SIZE))

        return expand


class PackedInt4Experts(Int4Experts):
    """Pack-quantized experts that stay packed, in the tiles of the Triton kernels; bfloat16 activations on a GPU."""

    group_size = PACKED_COLUMNS
    is_capturable = True

    def __init__(self, num_experts: int, width: int, expert_width: int, parallel: ParallelState, dtype: torch.dtype):
        nn.Module.__init__(self)
        # Imported here so that no machine needs Triton before it has a GPU.
        from engine.kernels.gpu import experts as kernels

        if dtype != torch.bfloat16:
            raise ValueError(f"packed experts multiply bfloat16, not {dtype}; use the expanded storage.")
        self._kernels = kernels
        self.num_experts, self.width, self.expert_width = num_experts, width, expert_width
        self.local = parallel.expert_range(num_experts)
        self.columns = parallel.expert_columns(expert_width, self.group_size)
        size = self.columns.stop - self.columns.start
        packed = kernels.empty_experts(len(self.local), width, size, parallel.device)
        for name, tensor in vars(packed).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.packed = packed
        # Whoever sums over ranks, or norms where there are none, adds the experts' outputs too; of rows that lack some
        # it would read zeros.
        self.in_parts = len(self.local) == num_experts

    def forward(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        shared_act_TI: torch.Tensor | None = None,
        shared_down_DI: torch.Tensor | None = None,
        plan: Any = None,
    ) -> torch.Tensor:
        """As `FloatExperts.forward`; up to 64 rows in parts [K + 1, T, D] where no other rank adds to them."""
        return self._kernels.int4_experts(
            x_TD, ids_TK.int(), weights_TK, self.packed, shared_act_TI, shared_down_DI, plan, in_parts=self.in_parts
        )

    def _sink(self, name: str, index: int) -> _Sink:
        def pack(packed: torch.Tensor, scale: torch.Tensor) -> None:
            if name == "down_proj":
                self._kernels.put_down(self.packed, index, packed, scale)
            else:
                self._kernels.put_gate_or_up(self.packed, index, name == "up_proj", packed, scale)

        return pack


def _expand_on_host(room: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> None:
    """`reference.unpack_int4` into room [out, in], of float type, a few rows at a time: what lies between stays in the
    processor's cache. A product of a nibble and a bfloat16 scale is rounded once either way."""
    kind = scale.dtype if scale.dtype == room.dtype == torch.bfloat16 else torch.float32
    for start in range(0, room.shape[0], _HOST_ROWS):
        rows = slice(start, start + _HOST_ROWS)
        pairs = packed[rows].contiguous().view(torch.uint8)  # the low nibble is the column before the high one
        values = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).to(kind).sub_(8)
        groups = values.unflatten(-1, (-1, GROUP_SIZE)).mul_(scale[rows].to(kind).unsqueeze(-1))
        room[rows].copy_(groups.flatten(-2))


def packs(width: int, expert_width: int, parallel: ParallelState) -> bool:
    """Whether this rank's part of such experts is whole packed tiles."""
    return width % PACKED_COLUMNS == 0 and expert_width % (PACKED_COLUMNS * parallel.expert_tp) == 0


class _Unpacker:
    """Collects the two halves of one weight, in whatever order they are read, and hands them to its sink. It copies the
    first, since what was read is soon overwritten; a checkpoint's reader brings the small one first."""

    def __init__(self, shape: tuple[int, int], sink: _Sink):
        self._shape, self._sink = shape, sink
        self._packed: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None

    def packed(self, value: torch.Tensor) -> None:
        self._packed = value if self._scale is not None else value.clone()
        self._expand()

    def scale(self, value: torch.Tensor) -> None:
        self._scale = value if self._packed is not None else value.clone()
        self._expand()

    def shape(self, value: torch.Tensor) -> None:
        if tuple(value.tolist()) != self._shape:
            raise ValueError(f"says {value.tolist()}, the config says {list(self._shape)}.")

    def _expand(self) -> None:
        if self._packed is not None and self._scale is not None:
            self._sink(self._packed, self._scale)
            self._packed = self._scale = None


def _divided(columns: slice, by: int) -> slice:
    return slice(columns.start // by, columns.stop // by)


def _nothing(value: torch.Tensor) -> None:
    raise AssertionError("a tensor of another rank was read")


EXPERT_STORAGE: dict[str, Callable[..., FloatExperts]] = {
    "float": FloatExperts,
    "int4": Int4Experts,
    "packed_int4": PackedInt4Experts,
}


def detect_storage(tensors: dict[str, TensorHeader]) -> str:
    """How a checkpoint holds its routed experts, told by its tensors and not by its config.

    Raises ValueError naming a storage that is not supported.
    """
    for name, header in tensors.items():
        if header.dtype.startswith("F8_") or name.endswith(".weight_scale_inv"):
            raise ValueError(
                f"tensor {name} in {header.file.name} belongs to FP8 weights, which are not supported; "
                "use a BF16 or an INT4 pack-quantized checkpoint."
            )
    packed = any(".mlp.experts." in name and name.endswith(".weight_packed") for name in tensors)
    return "int4" if packed else "float"
