"""What is read of a machine: topology, pairs that hang, and what is said about them."""

import json
import sys

import pytest

from engine.doctor.links import Pair, parse_topology, watch_pairs

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-15\t0
GPU1\tNV18\t X \tNODE\tSYS\t0-15\t0
GPU2\tSYS\tNODE\t X \tSYS
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe
"""


def test_topology_is_read_by_names():
    found = parse_topology(TOPOLOGY)
    assert found[0, 1] == found[1, 0] == "NV18" and found[1, 2] == "NODE" and found[2, 0] == "SYS"
    assert len(found) == 6


@pytest.mark.parametrize("text", ["", "command not found", "GPU0 GPU1\nGPU0", "\n\n", "GPU0\nGPU0 X\nGPUx X"])
def test_what_is_not_understood_is_nothing(text):
    assert parse_topology(text) == {}


def printing(*lines: dict, then: str = "") -> list[str]:
    """A process that prints what `pairs` prints, but for pairs it is told to skip."""
    script = f"""
import json, sys, time
skip = json.loads(sys.argv[sys.argv.index("--skip") + 1]) if "--skip" in sys.argv else []
for line in json.loads({json.dumps(json.dumps(lines))}):
    if line.get("pair") not in skip and not ("load_seconds" in line and "--no-loads" in sys.argv):
        if line.pop("hang", False):
            print(json.dumps(dict(pair=line["pair"])), flush=True)
            time.sleep(600)
        if line.pop("crash", False):
            sys.exit("CUDA error: an illegal memory access")
        print(json.dumps(line), flush=True)
{then}
print(json.dumps(dict(done=True)))
"""
    return [sys.executable, "-c", script]


GOOD = {"peer": True, "bytes_per_second": 40e9, "small_seconds": 12e-6}


def watch(command):
    return watch_pairs(command, start_seconds=20, pair_seconds=0.3)


def test_all_pairs_are_fine():
    gpus, pairs, reason = watch(
        printing({"gpus": [{"name": "A"}, {"name": "B"}]}, {"pair": [0, 1], **GOOD}, {"pair": [1, 0], **GOOD})
    )
    assert [gpu["name"] for gpu in gpus] == ["A", "B"] and reason is None
    assert pairs == [Pair(0, 1, **GOOD), Pair(1, 0, **GOOD)]
    assert [pair.warning() for pair in pairs] == [None, None]


def test_a_pair_that_hangs_is_named_and_the_others_are_tried():
    _, pairs, reason = watch(printing({"gpus": []}, {"pair": [0, 1], "hang": True, **GOOD}, {"pair": [1, 0], **GOOD}))
    assert reason is None and pairs[1] == Pair(1, 0, **GOOD)
    assert "GPU 0 -> GPU 1: a copy did not end within 0.3 s" in pairs[0].warning()


def test_a_read_that_crashes_leaves_the_copies():
    _, pairs, reason = watch(
        printing(
            {"gpus": []},
            {"pair": [0, 1], **GOOD},
            {"pair": [0, 1], "load_seconds": 1, "crash": True},
            {"pair": [1, 0], **GOOD},
        )
    )
    assert reason is None and [pair.bytes_per_second for pair in pairs] == [40e9, 40e9]
    assert "a kernel's read ended the process (CUDA error: an illegal memory access)" in pairs[0].failed


def test_a_process_that_cannot_start_says_why():
    gpus, pairs, reason = watch([sys.executable, "-c", "import sys; sys.exit('no CUDA here')"])
    assert (gpus, pairs) == ([], []) and "no CUDA here" in reason


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"peer": False, "bytes_per_second": 12e9, "small_seconds": 30e-6}, "no peer access"),
        ({**GOOD, "small_seconds": 242e-6}, "a copy of 16 kB takes 242.0 us"),
        ({**GOOD, "bytes_per_second": 2.6e9}, "copies run at 2.6 GB/s"),
        ({**GOOD, "load_seconds": 9e-6}, "a read takes 9.0 us"),
    ],
)
def test_staged_paths_are_named(measured, said):
    assert said in Pair(2, 3, **measured).warning() and "GPU 2 -> GPU 3" in Pair(2, 3, **measured).warning()
