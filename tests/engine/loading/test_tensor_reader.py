import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.loading import tensor_reader
from engine.loading.checkpoint_headers import TensorHeader, read_header
from engine.loading.extent_reader import ALIGNMENT, Extent
from engine.loading.tensor_reader import TYPES, Wish

CPU = torch.device("cpu")


def write(path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file with the data in the order given, at whatever places that leads to."""
    names = {dtype: name for name, dtype in TYPES.items()}
    header, data = {}, b""
    for name, value in tensors.items():
        raw = bytes_of(value)
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def bytes_of(value: torch.Tensor) -> bytes:
    return value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 2, (count,), dtype=torch.uint8)  # bools have no other bytes


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_wanted_part_of_every_tensor(tmp_path_factory, data):
    """Of any type and shape, at odd places too, any rows and columns: as slicing the whole would give."""
    folder = tmp_path_factory.mktemp("tensors")
    whole, wishes = {}, []
    for number in range(data.draw(st.integers(1, 3))):
        tensors = {}
        for i in range(data.draw(st.integers(1, 4))):
            dtype = data.draw(st.sampled_from(list(TYPES.values())))
            shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
            count = int(torch.tensor([1, *shape]).prod()) * dtype.itemsize
            tensors[f"{number}.{i}"] = random_bytes(count).view(dtype).view(shape)
        write(folder / f"{number}.safetensors", tensors)
        whole |= tensors
        for name, header in read_header(folder / f"{number}.safetensors").items():
            bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in header.shape]
            if data.draw(st.booleans()):
                wishes.append(Wish(name, header, tuple(slice(*pair) for pair in bounds)))
    wishes = data.draw(st.permutations(wishes))
    seen = set()
    for wish, value in tensor_reader.read(list(wishes), CPU):
        expected = whole[wish.name][wish.part] if wish.part else whole[wish.name]
        assert value.dtype == expected.dtype and value.shape == expected.shape
        assert bytes_of(value) == bytes_of(expected)
        seen.add(wish.name)
    assert seen == {wish.name for wish in wishes}


def header(name: str, dtype: str, start: int) -> TensorHeader:
    return TensorHeader(name, dtype, (4, 4), start)


def test_words_come_after_their_scales_file_by_file():
    whole = (slice(None), slice(None))
    wishes = [
        Wish("words", header("a", "I32", 100), whole),
        Wish("other", header("b", "BF16", 100), whole),
        Wish("scales", header("a", "BF16", 900), whole),
    ]
    order = [extent for span in tensor_reader.plan(wishes) for extent in span.extents]
    assert order == [Extent("a", 900, 32), Extent("a", 100, 64), Extent("b", 100, 32)]


def test_rows_are_read_alone_and_columns_with_their_rows():
    rows = Wish("w", header("a", "BF16", 100), (slice(1, 3), slice(None)))
    columns = Wish("w", header("a", "BF16", 100), (slice(None), slice(1, 2)))
    assert (rows.extent, columns.extent) == (Extent("a", 108, 16), Extent("a", 100, 32))
    apart = Wish("w", header("a", "BF16", 100), (slice(0, 4, 2), slice(None)))
    with pytest.raises(ValueError, match="do not lie together"):
        _ = apart.extent


def test_rows_whose_columns_are_shared_out_are_common_spans():
    half = Wish("half", header("a", "BF16", 0), (slice(None), slice(0, 2)))
    whole = Wish("whole", header("a", "BF16", 32), (slice(None), slice(0, 4)))
    found = {extent.offset: span.is_common for span in tensor_reader.plan([half, whole]) for extent in span.extents}
    assert found == {0: True, 32: False}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_long_tensor_in_pieces_is_the_whole(tmp_path_factory, data):
    """Of rows of all lengths, those longer than a span too, and of cut columns; none of the pieces is longer than a
    span unless one row is."""
    shape = data.draw(st.sampled_from([(0, 3), (1, 9000), (5000, 3), (40, 1000), (7, 5000), (200, 64)]))
    whole = torch.arange(shape[0] * shape[1], dtype=torch.int16).view(shape)
    path = tmp_path_factory.mktemp("long") / "model.safetensors"
    write(path, {"w": whole})
    bounds = [slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape]
    target = torch.zeros_like(whole[tuple(bounds)])
    wish = Wish("w", read_header(path)["w"], tuple(bounds), store=target.copy_)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_reader, "SPAN_BYTES", 8192)
        pieces = wish.in_pieces(lambda rows: target[rows].copy_)
        spans = tensor_reader.plan(pieces, 8192)
    assert all(span.size <= 8192 for span in spans) or shape[1] * 2 > 8192 - 2 * ALIGNMENT
    for piece, value in tensor_reader.read(data.draw(st.permutations(pieces)), CPU):
        piece.store(value)
    assert torch.equal(target, whole[tuple(bounds)])
