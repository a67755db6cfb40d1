"""Headers of safetensors files that make no sense: each is refused in one sentence, none escapes as another error."""

from __future__ import annotations

import gc
import json
import os
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.loading.checkpoint_headers import CheckpointError, read_header, read_headers
from engine.loading.weights import Checkpoint


def write(path, header: bytes, data: bytes = b"1234"):
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def entry(**changes) -> dict:
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}


@pytest.mark.parametrize(
    "changes",
    [{"data_offsets": v} for v in ([0, 4, 5], [0], [], None, "04", [0.0, 4.0], [0, "4"], [-4, 0], [1, 5], [0, 8])]
    + [{"shape": v} for v in ([-1, -1], ["1"], [1.0], [True], 1, None, [2])]
    + [{"dtype": v} for v in (["F32"], None, 4, "F64")],
)
def test_an_entry_that_makes_no_sense(tmp_path, changes):
    file = write(tmp_path / "a.safetensors", json.dumps({"weight": entry(**changes)}).encode())
    with pytest.raises(CheckpointError, match="weight") as caught:
        read_header(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "header", [b"", b"{", b"null", b"[1]", b"5", b"\xff\xfe{}", b"[" * 200_000, json.dumps({"a": 5}).encode()]
)
def test_a_header_that_is_no_table(tmp_path, header):
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        read_header(write(tmp_path / "a.safetensors", header))


def test_data_that_belongs_to_no_tensor(tmp_path):
    header = json.dumps({"weight": entry()}).encode()
    assert read_header(write(tmp_path / "a.safetensors", header))["weight"].shape == (1,)
    with pytest.raises(CheckpointError, match="4 bytes"):
        read_header(write(tmp_path / "a.safetensors", header, b"12345678"))


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors is not a file"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="names no tensor"):
        Checkpoint(tmp_path)


def test_a_link_that_leads_nowhere(tmp_path):
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        Checkpoint(tmp_path)


@given(st.binary(max_size=80))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes(tmp_path, data):
    file = tmp_path / "a.safetensors"
    file.write_bytes(data)
    with pytest.raises(CheckpointError):
        read_header(file)


@pytest.mark.parametrize("offsets", [[4, 8], [8, 4], [0, 2]])
def test_b154_a_name_that_stands_twice_leaves_data_without_a_tensor(tmp_path, offsets):
    """JSON keeps the last of the two; the first one's bytes, or the overlap, tell."""
    first, second = (json.dumps({"weight": entry(data_offsets=place)})[1:-1] for place in ([0, 4], offsets))
    file = write(tmp_path / "a.safetensors", f"{{{first},{second}}}".encode(), b"12345678")
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        read_header(file)


@pytest.mark.parametrize("offsets", [[4, 0], [0, 3], [1, 4]])
def test_b154_a_type_that_is_not_known_still_has_to_have_a_place(tmp_path, offsets):
    header = json.dumps({"weight": entry(dtype="F4_E2M1", data_offsets=offsets)}).encode()
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        read_header(write(tmp_path / "a.safetensors", header))


def test_b154_the_first_damaged_file_is_named_though_all_are_read_at_once(tmp_path):
    names = [f"{number}.safetensors" for number in range(40)]
    for number, name in enumerate(names):
        header = json.dumps({f"weight.{number}": entry()}).encode()
        write(tmp_path / name, header, b"123" if number in (17, 30) else b"1234")
    with pytest.raises(CheckpointError, match=r"/17\.safetensors: tensor weight\.17 ends at byte 4, .* holds 3"):
        read_headers([tmp_path / name for name in names])
    assert gc.isenabled()
