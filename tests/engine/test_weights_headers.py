"""Headers of safetensors files that make no sense: each is refused in one sentence, none escapes as another error."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.weights import Checkpoint, CheckpointError, read_header


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
