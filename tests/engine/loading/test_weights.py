"""A checkpoint that is damaged stops the start with one sentence that names the tensor and the file; none of its code
is ever run. Everything goes through the public `LLM`."""

from __future__ import annotations

import shutil

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import ConfigError
from engine.loading.weights import CheckpointError
from tests import oracle
from tests.checkpoints import SMALL, build_checkpoint
from tests.damage import DAMAGES, add, find
from tests.damage_hostile import HOSTILE

REFUSED = (CheckpointError, ConfigError)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("sound"), SMALL, shards=3)


def load(directory) -> LLM:
    return LLM(model=str(directory), device="cpu", dtype="float32", num_threads=1)


def check_sentence(error: Exception, words: list[str]) -> None:
    message = str(error)
    assert "\n" not in message and 20 < len(message) < 600, message
    assert message.rstrip().endswith("."), message
    for word in words:
        assert word in message, f"{word!r} is not named in: {message}"


@pytest.mark.parametrize("damage", [*DAMAGES, *HOSTILE])
def test_b154_damage_stops_the_start_and_is_named(sound, tmp_path, damage):
    directory = tmp_path / "model"
    shutil.copytree(sound, directory)
    words = (DAMAGES | HOSTILE)[damage](directory)
    with pytest.raises(REFUSED) as caught:
        load(directory)
    check_sentence(caught.value, words)


def test_b151_unknown_tensors_beside_those_of_vision_are_refused_by_name_and_number(tmp_path):
    build_checkpoint(tmp_path, SMALL, shards=3, vision=True)
    names = [f"language_model.model.layers.0.{name}.weight" for name in ("b_unknown", "a_unknown", "c_unknown")]
    for name in names:
        file = add(tmp_path, name, torch.zeros(2), find(tmp_path, "lm_head.weight")[1])[1]
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    check_sentence(caught.value, [f"{file}: tensor {names[1]} belongs to no part of this model (and 2 more)."])


def test_the_sound_checkpoint_loads(sound):
    """Without it, a loader that refuses everything would pass."""
    prompt = oracle.prompts()[1]
    answer = load(sound).generate([prompt], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0]
    assert [answer.outputs[0].token_ids] == oracle.greedy(oracle.deepseek_v3(sound), [prompt], 4)


@pytest.mark.parametrize("kind", ["unknown", "file", "empty", "no_checkpoint"])
def test_a_path_that_is_no_checkpoint(tmp_path, kind):
    path = tmp_path / "model"
    if kind == "file":
        path.write_text("not a directory")
    elif kind != "unknown":
        path.mkdir()
    if kind == "no_checkpoint":
        (path / "README.md").write_text("nothing here")
    with pytest.raises(REFUSED) as caught:
        load(path)
    check_sentence(caught.value, [str(path)])


def test_a_path_too_long_for_any_file():
    with pytest.raises(ConfigError) as caught:
        load("x" * 5000)
    check_sentence(caught.value, ["does not exist"])


CODE_FILES = (
    "tokenization_kimi.py",
    "configuration_kimi_k25.py",
    "modeling_kimi_k25.py",
    "modeling_deepseek.py",
    "tool_declaration_ts.py",
    "__init__.py",
    "conftest.py",
    "sitecustomize.py",
)


def test_no_code_of_the_model_folder_runs(sound, tmp_path, monkeypatch):
    """Remote code next to the weights stays unread, and so does a pickle that would run code when opened."""
    directory, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(sound, directory)
    for name in CODE_FILES:
        (directory / name).write_text(f"open({str(marker)!r}, 'w').close()\n")
    (directory / "pytorch_model.bin").write_bytes(_pickle_that_creates(marker))
    monkeypatch.chdir(directory)
    llm = load(directory)
    llm.generate([oracle.prompts()[1]], SamplingParams(temperature=0.0, max_tokens=2))
    assert not marker.exists()


def _pickle_that_creates(marker) -> bytes:
    import pickle

    class Opens:
        def __reduce__(self):
            return open, (str(marker), "w")

    return pickle.dumps(Opens())


def test_a_pickle_is_no_checkpoint(sound, tmp_path):
    """With only a pickle there, the start is refused and the pickle stays closed."""
    directory, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(sound, directory)
    DAMAGES["no_weights"](directory)
    (directory / "pytorch_model.bin").write_bytes(_pickle_that_creates(marker))
    with pytest.raises(REFUSED):
        load(directory)
    assert not marker.exists()
