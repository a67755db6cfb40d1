"""A model that was loaded from prepared weights is the model that was loaded from its checkpoint, bit by bit."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import LLM, SamplingParams
from engine.comm.parallel_state import ParallelState
from engine.config import ConfigError, EngineConfig
from engine.layers.quant import PackedInt4Experts
from engine.loading.prepared.weights import Preparation, PreparedWeights
from engine.loading.progress import LoadProgress
from engine.loading.weights import Checkpoint, CheckpointError, TensorSpec
from engine.model_files import ModelFiles
from engine.model_loading import load_share, open_share
from models.kimi_k25 import prepared as module
from models.kimi_k25 import weights
from models.kimi_k25.prepared import LAYOUT_VERSION
from tests import oracle
from tests.checkpoints import SMALL, build_checkpoint
from tests.prepared_files import flip, left

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
NAME = "rank-0-of-1-ep-1.prepared"


def without_template(model: Path) -> Path:
    """To compile it takes most of the time of so small a load."""
    (model / "chat_template.jinja").unlink()
    return model


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    return without_template(build_checkpoint(tmp_path_factory.mktemp("int4"), SMALL))


@pytest.fixture
def int4(built, tmp_path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "int4"))


def load(model: Path, directory: Path | None, rank: int = 0, progress: LoadProgress | None = None, **settings):
    """This rank's share."""
    config = EngineConfig(
        str(model),
        **{"device": "cpu", "dtype": "float32", "self_test": False, "prepared_weights": directory} | settings,
    )
    parallel = ParallelState(rank, config.tp, config.ep, is_share=True)
    return load_share(config, ModelFiles.read(config), parallel, progress=progress)


def preparation(directory: Path) -> Preparation:
    return Preparation(str(directory), 60.0)


def are_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def poison(monkeypatch) -> None:
    """From now on a checkpoint's weights cannot be read."""

    def fail(*arguments, **options):
        raise CheckpointError("the checkpoint was read.")

    monkeypatch.setattr(Checkpoint, "load", fail)


@pytest.fixture(scope="module")
def plain_experts(tmp_path_factory) -> Path:
    return without_template(build_checkpoint(tmp_path_factory.mktemp("bf16"), SMALL, quant="bf16", shards=3))


@pytest.mark.parametrize(
    ("source", "tp", "ep", "dtype"),
    [("built", 1, 1, "float32"), ("built", 2, 1, "float32"), ("plain_experts", 2, 2, "bfloat16")],
)
def test_every_parameter_is_as_it_was(request, tmp_path, monkeypatch, source, tp, ep, dtype):
    checkpoint = request.getfixturevalue(source)
    settings = {"tp": tp, "ep": ep, "dtype": dtype}
    plain = [load(checkpoint, None, rank, **settings) for rank in range(tp)]
    for rank in range(tp):
        load(checkpoint, tmp_path / "new" / "place", rank, **settings)
    poison(monkeypatch)
    with pytest.raises(CheckpointError, match="was read"):
        load(checkpoint, tmp_path, **settings)
    progress = LoadProgress()
    again = [load(checkpoint, tmp_path / "new" / "place", rank, progress, **settings) for rank in range(tp)]
    assert all(map(are_equal, plain, again))
    assert progress.snapshot().is_complete
    assert left(tmp_path / "new" / "place") == [f"rank-{rank}-of-{tp}-ep-{ep}.prepared" for rank in range(tp)]


def test_greedy_answers_are_the_same(built, tmp_path, monkeypatch):
    prompts = oracle.prompts()[1:3]
    expected = oracle.greedy(oracle.deepseek_v3(built), prompts, GREEDY.max_tokens)

    def answers() -> list[list[int]]:
        llm = LLM(str(built), device="cpu", dtype="float32", num_threads=1, prepared_weights=tmp_path)
        return [answer.outputs[0].token_ids for answer in llm.generate(prompts, GREEDY)]

    assert answers() == expected
    poison(monkeypatch)
    assert answers() == expected


def ramp(shape: tuple[int, ...], first: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers that are exact in every type."""
    return ((torch.arange(math.prod(shape)) * 37 + first) % 251).to(dtype).view(shape)


def fill(specs: dict[str, TensorSpec]) -> None:
    """Every value known by its place in the checkpoint."""
    for number, (name, spec) in enumerate(sorted(specs.items())):
        if spec.part is not None and not name.endswith("_shape"):
            dtype = torch.int32 if "I32" in spec.dtypes else torch.float32
            spec.store(ramp(spec.shape, number, dtype)[spec.part])


def packed_experts() -> PackedInt4Experts:
    """As a rank of a GPU holds them, of zeros."""
    return PackedInt4Experts(2, 128, 256, ParallelState(), torch.bfloat16)


def test_packed_tiles_come_back_where_the_kernels_look(tmp_path):
    experts, again = packed_experts(), packed_experts()
    fill(experts.specs(""))
    files = [
        PreparedWeights(preparation(tmp_path), "a", dict, dict(one.named_parameters())) for one in (experts, again)
    ]
    assert files[0].store() and files[1].load()
    tiles = {name: (tensor, getattr(again.packed, name)) for name, tensor in vars(experts.packed).items()}
    assert len(tiles) == 4 and all(one.any() and torch.equal(one, other) for one, other in tiles.values())


def digest(module: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, parameter in module.named_parameters():
        found.update(name.encode() + parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def test_where_values_lie_has_not_changed(built):
    """Else files that were prepared before would be taken for new ones: raise LAYOUT_VERSION, then write the digests
    that there are now here."""
    config = EngineConfig(str(built), device="cpu", dtype="float32", tp=2)
    opened = open_share(config, ModelFiles.read(config), ParallelState(1, 2, 1))
    experts = packed_experts()
    fill(opened.specs)
    fill(experts.specs(""))
    found = (LAYOUT_VERSION, digest(opened.model), digest(experts))
    assert found == (1, "bbcd5a80cd790ae4", "c12164d2d3988de2")


# Another key.


def touch(model: Path) -> None:
    os.utime(next(model.glob("*.safetensors")), ns=(1, 1))


def change_header(model: Path) -> None:
    """The time of the last change and the size stay."""
    file = next(model.glob("*.safetensors"))
    before, data = file.stat(), file.read_bytes()
    file.write_bytes(data.replace(b'"format":"pt"', b'"format":"px"'))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size and file.read_bytes() != data


def rename(model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    file = next(model.glob("*.safetensors"))
    file.rename(model / "weights.safetensors")


def change_index(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text() + " ")


SOURCE_CHANGES = {
    "weight files: time": touch,
    "weight files: header": change_header,
    "index": rename,
    "index: text": change_index,
}
EXPERTS = SMALL.n_routed_experts
SETTINGS = {
    "dtype": {"dtype": "bfloat16"},
    "expert map": {"expert_map": list(range(EXPERTS))[::-1]},
    "model config": {"hf_overrides": {"rms_norm_eps": 1e-4}},
    "shared expert": {"moe_comm": "nccl_a2a"},
}


def check_prepared_anew(model: Path, directory: Path, part: str, caplog, monkeypatch, **settings) -> None:
    """The file is refused, named, replaced and then good."""
    caplog.clear()
    plain, loaded = load(model, None, **settings), load(model, directory, **settings)
    assert f"{directory / NAME} is not used: it was prepared for {part} " in caplog.text
    poison(monkeypatch)
    assert are_equal(plain, loaded) and are_equal(plain, load(model, directory, **settings))
    assert left(directory) == [NAME]


@pytest.mark.parametrize("change", SOURCE_CHANGES)
def test_another_source_is_another_key(int4, tmp_path, caplog, monkeypatch, change):
    load(int4, tmp_path / "prepared")
    SOURCE_CHANGES[change](int4)
    check_prepared_anew(int4, tmp_path / "prepared", change.split(":")[0], caplog, monkeypatch)


@pytest.mark.parametrize("part", SETTINGS)
def test_another_setting_is_another_key(int4, tmp_path, caplog, monkeypatch, part):
    load(int4, tmp_path / "prepared")
    check_prepared_anew(int4, tmp_path / "prepared", part, caplog, monkeypatch, **SETTINGS[part])


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [("layout", "LAYOUT_VERSION", 2), ("engine", "__version__", "9.9"), ("byte order", "sys", None)],
)
def test_another_engine_is_another_key(int4, tmp_path, caplog, monkeypatch, part, name, value):
    load(int4, tmp_path / "prepared")
    monkeypatch.setattr(module, name, SimpleNamespace(byteorder="big") if value is None else value)
    check_prepared_anew(int4, tmp_path / "prepared", part, caplog, monkeypatch)


@pytest.mark.parametrize(
    ("wanted", "theirs", "part"),
    [((1, 2, 2), (0, 2, 2), "rank"), ((0, 2, 1), (0, 1, 1), "tp"), ((0, 2, 1), (0, 2, 2), "ep")],
)
def test_another_place_is_another_key(int4, tmp_path, caplog, monkeypatch, wanted, theirs, part):
    """Even where someone gave the file the other's name."""
    rank, tp, ep = theirs
    load(int4, tmp_path, rank, tp=tp, ep=ep)
    file = tmp_path / f"rank-{rank}-of-{tp}-ep-{ep}.prepared"
    rank, tp, ep = wanted
    file.rename(tmp_path / f"rank-{rank}-of-{tp}-ep-{ep}.prepared")
    assert are_equal(load(int4, tmp_path, rank, tp=tp, ep=ep), load(int4, None, rank, tp=tp, ep=ep))
    assert f"prepared for {part} " in caplog.text


@pytest.mark.parametrize("part", ["experts", "device"])
def test_other_experts_or_another_device_are_another_key(int4, tmp_path, caplog, part):
    load(int4, tmp_path / "prepared")
    opened = open_share(EngineConfig(str(int4), device="cpu", dtype="float32"), *files_and_place(int4))
    if part == "device":
        opened.model.parallel = ParallelState(device=torch.device("meta"))
    storage = "float" if part == "experts" else "int4"
    assert not module.prepared_weights(
        preparation(tmp_path / "prepared"), opened.model, opened.checkpoint, storage
    ).load()
    assert f"prepared for {part} " in caplog.text


def files_and_place(model: Path) -> tuple[ModelFiles, ParallelState]:
    return ModelFiles.read(EngineConfig(str(model))), ParallelState()


# What is checked all the same.


def test_a_damaged_file_costs_its_advantage_alone(int4, tmp_path, caplog):
    plain = load(int4, tmp_path / "prepared")
    flip(tmp_path / "prepared" / NAME, (tmp_path / "prepared" / NAME).stat().st_size - 9000)
    assert are_equal(plain, load(int4, tmp_path / "prepared")) and "are damaged" in caplog.text
    caplog.clear()
    assert are_equal(plain, load(int4, tmp_path / "prepared")) and "not used" not in caplog.text


def test_the_self_test_compares_with_the_checkpoint(int4, tmp_path, caplog):
    """A file that is whole and of the right key, with another expert in it than the checkpoint's."""
    sound, model = load(int4, tmp_path / "plain"), load(int4, tmp_path / "prepared")
    model.layers[-1].feed_forward.experts.down.mul_(1.5)
    opened = open_share(EngineConfig(str(int4), device="cpu", dtype="float32"), *files_and_place(int4))
    (tmp_path / "prepared" / NAME).unlink()
    assert module.prepared_weights(preparation(tmp_path / "prepared"), model, opened.checkpoint, "int4").store()
    assert are_equal(model, load(int4, tmp_path / "prepared")), "without a test it is taken"
    assert are_equal(sound, load(int4, tmp_path / "prepared", self_test=True))
    assert f"{tmp_path / 'prepared' / NAME} is not used: self-test" in caplog.text
    assert are_equal(sound, load(int4, tmp_path / "prepared")), "and written anew"


def test_weights_that_fail_a_check_are_not_prepared(int4, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "largest_error", lambda *arguments: 1.0)
    with pytest.raises(ConfigError, match="self-test"):
        load(int4, tmp_path / "prepared", self_test=True)
    assert not (tmp_path / "prepared").exists()


def test_a_checkpoint_whose_file_is_missing_is_refused_beside_prepared_weights(int4, tmp_path):
    load(int4, tmp_path / "prepared")
    next(int4.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        load(int4, tmp_path / "prepared")


@pytest.mark.parametrize("value", ["", 7, "a\0b"])
def test_a_directory_that_makes_no_sense(value):
    with pytest.raises(ConfigError, match="prepared_weights"):
        EngineConfig(prepared_weights=value)


def test_made_up_weights_are_not_prepared():
    with pytest.raises(ConfigError, match="prepared_weights"):
        EngineConfig(prepared_weights="somewhere", load_format="dummy")
