"""Whether the model fits, as the doctor says it: on this machine, or of GPUs that are only named."""

import json

import pytest

from engine.cache_plan import GIB
from engine.doctor.__main__ import main
from engine.doctor.memory import COMMON_MEMORY, memory_section
from engine.doctor.settings import Settings

TINY = "models/kimi_k25/tiny"


def test_full_model_on_eight_large_gpus():
    section, data = memory_section(Settings(8, 8, "cpu"), int(140.4 * GIB))
    assert data["fits"] and section.notes[0].startswith("Fits: 8 ranks of 140.40 GiB: 70.95 GiB of weights each, 63.78")
    by_ranks = {row["tp"]: row for row in section.rows}
    assert list(by_ranks) == [1, 2, 4, 8, 16] and [by_ranks[tp]["fits"] for tp in (4, 8)] == [False, True]
    parts = ("attention", "dense layers", "shared expert", "routed experts", "router", "embedding and head")
    for row in section.rows:
        assert sum(row[part] for part in parts) == pytest.approx(row["weights GiB"], abs=0.03)
    assert by_ranks[8]["KV kB/token"] == 70.272 and by_ranks[8]["longest"] == 262144


def test_ranks_over_which_the_model_does_not_divide_do_not_fit():
    section, data = memory_section(Settings(3, 3, "cpu"), None)
    assert not data["fits"] and "does not fit: 64 attention heads (tp=3)" in data["verdict"]
    assert f"reckoned for one of {COMMON_MEMORY / GIB:.1f} GiB" in section.text()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--gpus", "8", "--gpu-memory-gb", "80"], 0, "Fits: 8 ranks of 80.00 GiB"),
        (["--gpus", "4", "--gpu-memory-gb", "80"], 1, "Does not fit: 4 ranks of 80.00 GiB: each needs 139.87 GiB of"),
        (["--gpus", "8", "--gpu-memory-gb", "80", "--max-model-len", "262144"], 1, "; tp 16 or --max-model-len"),
        (["--gpus", "8", "--draft", "auto"], 0, "draft"),
        (["--memory", "--model", TINY, "--draft", "auto", "--kv-cache-dtype", "fp8"], 0, "No GPU here"),
    ],
)
def test_a_laptop_can_ask(capsys, tmp_path, options, code, words):
    file = tmp_path / "memory.json"
    assert main([*options, "--json", str(file)]) == code
    said, data = capsys.readouterr().out, json.loads(file.read_text())["memory"]
    assert words in said and "tp" in said and data["fits"] == (code == 0)
    assert {row["tp"] for row in data["worlds"] if row["fits"]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "0"], "--gpus must be above 0"),
        (["--gpu-memory-gb", "-1"], "--gpu-memory-gb must be above 0"),
        (["--memory", "--max-model-len", "0"], "max_model_len"),
        (["--memory", "--draft", "nowhere"], "nowhere"),
        (["--memory", "--model", "nowhere"], "nowhere"),
    ],
)
def test_a_question_that_makes_no_sense(capsys, options, words):
    assert main(options) == 2
    assert words in capsys.readouterr().err
