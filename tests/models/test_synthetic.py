"""Made-up checkpoints in Kimi-K2.5's layout: the real one's counts, safetensors' own bytes, and a run cut short."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.loading.checksums import verify
from engine.loading.weights import INDEX_NAME, Checkpoint, CheckpointError
from models.kimi_k25 import synthetic
from models.kimi_k25.synthetic import Plan, write

SMALL = {
    "num_hidden_layers": 3, "n_routed_experts": 12, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 64, "num_attention_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 768,
}  # fmt: skip
SMALL_VISION = {
    "vt_num_hidden_layers": 2, "vt_hidden_size": 32, "vt_intermediate_size": 48, "mm_hidden_size": 32,
    "init_pos_emb_height": 4, "init_pos_emb_width": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def full() -> Plan:
    return Plan.of({})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    directory = tmp_path_factory.mktemp("synthetic")
    write(Plan.of(SMALL, SMALL_VISION, seed=7), directory)
    return directory


def test_the_full_plan_has_the_real_checkpoints_counts(full):
    assert (len(full.files), full.num_tensors) == (64, 208_550)
    assert f"{full.num_bytes / 2**30:.2f}" == "554.27" and f"{full.num_bytes / 1e9:.2f}" == "595.15"
    on_disk = full.num_bytes + sum(len(file.header()) for file in full.files)
    assert f"{on_disk / 2**30:.2f}" == "554.30"
    assert full.files[0].name == "model-00001-of-000064.safetensors"


def test_every_tensor_of_the_full_plan_stands_where_the_real_one_does(full):
    files = {tensor.name: (number, tensor) for number, file in enumerate(full.files, 1) for tensor in file.tensors}
    expected = {
        "language_model.model.embed_tokens.weight": (62, "BF16", (163840, 7168)),
        "language_model.lm_head.weight": (62, "BF16", (163840, 7168)),
        "language_model.model.layers.0.mlp.down_proj.weight": (1, "BF16", (7168, 18432)),
        "language_model.model.layers.60.mlp.gate.e_score_correction_bias": (61, "F32", (384,)),
        "language_model.model.layers.7.self_attn.o_proj.weight": (8, "BF16", (7168, 8192)),
        "language_model.model.layers.1.mlp.experts.383.up_proj.weight_packed": (2, "I32", (2048, 896)),
        "language_model.model.layers.1.mlp.experts.383.down_proj.weight_packed": (2, "I32", (7168, 256)),
        "language_model.model.layers.1.mlp.experts.383.down_proj.weight_scale": (2, "BF16", (7168, 64)),
        "language_model.model.layers.1.mlp.experts.0.gate_proj.weight_shape": (2, "I32", (2,)),
        "mm_projector.proj.2.weight": (63, "BF16", (7168, 4608)),
        "vision_tower.encoder.blocks.26.wqkv.weight": (64, "BF16", (3456, 1152)),
        "vision_tower.patch_embed.pos_emb.weight": (64, "BF16", (64, 64, 1152)),
    }
    found = {name: (files[name][0], files[name][1].dtype, files[name][1].shape) for name in expected}
    assert found == expected


def test_files_are_the_bytes_that_safetensors_would_write(small, tmp_path):
    """The order of data included, which a reader's plan depends on."""
    for path in small.glob("*.safetensors"):
        with safe_open(path, framework="pt") as reader:
            metadata = reader.metadata()
        save_file(load_file(path), tmp_path / path.name, metadata=metadata)
        ours, theirs = path.read_bytes(), (tmp_path / path.name).read_bytes()
        assert ours[int.from_bytes(ours[:8], "little") + 8 :] == theirs[int.from_bytes(theirs[:8], "little") + 8 :]
        names = [json.loads(data[8 : int.from_bytes(data[:8], "little") + 8]) for data in (ours, theirs)]
        assert list(names[0])[1:] == list(names[1])[1:] and names[0] == names[1]


def test_it_loads_and_answers(small):
    llm = LLM(model=str(small), device="cpu", dtype="float32", num_threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    answers = llm.generate(["the quick", "brown fox jumps"], params)
    assert all(len(answer.outputs[0].token_ids) == 8 for answer in answers)
    assert all(math.isfinite(one.logprob) for a in answers for step in a.outputs[0].logprobs for one in step.values())
    assert answers[0].outputs[0].token_ids != answers[1].outputs[0].token_ids


def test_values_depend_on_seed_and_name_alone(small, tmp_path):
    write(Plan.of(SMALL, SMALL_VISION, num_files=2, seed=7), tmp_path / "two", workers=2)
    write(Plan.of(SMALL, SMALL_VISION, seed=8), tmp_path / "other")

    def tensors(directory) -> dict[str, torch.Tensor]:
        return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}

    ours, two, other = tensors(small), tensors(tmp_path / "two"), tensors(tmp_path / "other")
    assert len(list((tmp_path / "two").glob("*.safetensors"))) == 2
    assert ours.keys() == two.keys() and all(torch.equal(ours[name], two[name]) for name in ours)
    same = [name for name in ours if torch.equal(ours[name], other[name])]
    assert all(name.endswith("weight_shape") for name in same)


def test_scales_and_weights_are_of_a_sensible_size(small):
    tensors = load_file(small / "model-00002-of-000006.safetensors")
    name = "language_model.model.layers.1.mlp.experts.3.up_proj.weight"
    nibbles = (tensors[f"{name}_packed"].unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
    assert nibbles.float().mean().item() == pytest.approx(7.5, abs=0.3) and set(nibbles.unique().tolist()) == set(
        range(16)
    )
    scales = tensors[f"{name}_scale"].float().abs()
    assert scales.min() > 0.25 / 8 / 4.6 and scales.max() < 3 / 8 / 4.6
    query = tensors["language_model.model.layers.1.self_attn.q_a_proj.weight"].float()
    assert 0.6 / 8 < query.std() < 1.6 / 8


def test_a_run_that_was_cut_short_leaves_no_file_that_looks_whole_and_goes_on(small, tmp_path, monkeypatch):
    plan, written = Plan.of(SMALL, SMALL_VISION, seed=7), []
    real = synthetic._write_all

    def cut_short(stream, data):
        written.append(len(data))
        if len(written) > 40:
            raise OSError(28, "No space left on device")
        real(stream, data)

    monkeypatch.setattr(synthetic, "_write_all", cut_short)
    with pytest.raises(OSError, match="No space"):
        write(plan, tmp_path)
    whole = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert whole == ["model-00001-of-000006.safetensors"] and not (tmp_path / INDEX_NAME).exists()
    kept = (tmp_path / whole[0]).stat().st_mtime_ns
    monkeypatch.setattr(synthetic, "_write_all", real)
    write(plan, tmp_path)
    assert (tmp_path / whole[0]).stat().st_mtime_ns == kept and not list(tmp_path.glob("*.part"))
    assert all((tmp_path / file.name).read_bytes() == (small / file.name).read_bytes() for file in plan.files)


def test_sparse_files_have_every_header_and_take_no_room(tmp_path):
    plan = Plan.of({"num_hidden_layers": 3, "n_routed_experts": 16}, is_sparse=True)
    write(plan, tmp_path)
    files = list(tmp_path.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in files) > plan.num_bytes > 8 * 10**9
    assert sum(path.stat().st_blocks * 512 for path in files) < 2**20
    assert len(Checkpoint(tmp_path).tensors) == plan.num_tensors


def test_the_command(tmp_path, capsys):
    sizes = [f"--{name.replace('_', '-')}={SMALL[key]}" for name, key in synthetic._SIZES.items()]
    latents = {key: SMALL[key] for key in SMALL if key not in synthetic._SIZES.values()}
    arguments = ["--out", str(tmp_path / "made"), *sizes, "--vision-layers=0", "--hf-overrides", json.dumps(latents)]
    assert synthetic.main([*arguments, "--dry-run"]) == 0 and not (tmp_path / "made").exists()
    assert synthetic.main([*arguments, "--checksums", "--files=2"]) == 0
    assert "2 files, " in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "made").glob("*.safetensors"))
    assert verify(tmp_path / "made", names) is None
    with open(tmp_path / "made" / names[1], "r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x01")
    with pytest.raises(CheckpointError, match=names[1]):
        verify(tmp_path / "made", names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a size"),
        (["--layers=4"], "GB free"),
        (["--layers=2", "--files=0"], "0 files"),
        (["--vocab-size=99"], "512"),
    ],
)
def test_what_cannot_be_made_is_refused_before_a_byte_is_written(tmp_path, capsys, arguments, words, monkeypatch):
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 10**10})())
    assert synthetic.main(["--out", str(tmp_path / "made"), *arguments]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "made").exists()
