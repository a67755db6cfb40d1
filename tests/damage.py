"""Ways to break a checkpoint directory. Each takes the directory and returns the words that the error must contain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"


def read_index(directory: Path) -> dict:
    return json.loads((directory / INDEX).read_text())


def write_index(directory: Path, index: dict) -> None:
    (directory / INDEX).write_text(json.dumps(index))


def find(directory: Path, end: str) -> tuple[str, str]:
    """The first tensor whose name ends so, and its file."""
    return next((name, file) for name, file in read_index(directory)["weight_map"].items() if name.endswith(end))


def _edit(directory: Path, file: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file, metadata={"format": "pt"})


def replace(directory: Path, end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    name, file = find(directory, end)
    _edit(directory, file, lambda t: t.update({name: change(t[name]).contiguous()}))
    return [name, file]


def edit_config(directory: Path, change: Callable[[dict], None]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def truncated_by_one_byte(directory: Path) -> list[str]:
    file = directory / find(directory, "lm_head.weight")[1]
    file.write_bytes(file.read_bytes()[:-1])
    return [file.name]


def truncated_in_the_header(directory: Path) -> list[str]:
    file = directory / find(directory, "lm_head.weight")[1]
    file.write_bytes(file.read_bytes()[:100])
    return [file.name]


def empty_shard(directory: Path) -> list[str]:
    file = directory / find(directory, "lm_head.weight")[1]
    file.write_bytes(b"")
    return [file.name]


def deleted_shard(directory: Path) -> list[str]:
    file = find(directory, "layers.1.input_layernorm.weight")[1]
    (directory / file).unlink()
    return [file]


def not_safetensors(directory: Path) -> list[str]:
    file = find(directory, "lm_head.weight")[1]
    (directory / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 28\n")
    return [file]


def index_names_a_tensor_no_shard_has(directory: Path) -> list[str]:
    index = read_index(directory)
    name, file = find(directory, "layers.1.mlp.experts.3.up_proj.weight_packed")
    _edit(directory, file, lambda t: t.pop(name))
    write_index(directory, index)
    return [name, file]


def index_names_another_shard(directory: Path) -> list[str]:
    """The tensor is there, but not in the file that the index gives."""
    index = read_index(directory)
    name, file = find(directory, "layers.0.self_attn.q_a_proj.weight")
    other = next(f for f in index["weight_map"].values() if f != file)
    index["weight_map"][name] = other
    write_index(directory, index)
    return [name]


def index_is_not_json(directory: Path) -> list[str]:
    (directory / INDEX).write_text('{"weight_map": {')
    return [INDEX]


def index_without_weight_map(directory: Path) -> list[str]:
    write_index(directory, {"metadata": {}})
    return [INDEX, "weight_map"]


def index_points_outside(directory: Path) -> list[str]:
    """A shard name that leaves the directory must not be followed."""
    index = read_index(directory)
    name, file = find(directory, "model.norm.weight")
    outside = f"../{directory.name}/{file}"
    write_index(directory, {**index, "weight_map": {**index["weight_map"], name: outside}})
    return [INDEX]


def wrong_dtype(directory: Path) -> list[str]:
    return replace(directory, "layers.0.self_attn.o_proj.weight", lambda t: t.to(torch.int16))


def wrong_dtype_of_packed_words(directory: Path) -> list[str]:
    return replace(directory, "experts.0.gate_proj.weight_packed", lambda t: t.to(torch.int64))


def wrong_shape(directory: Path) -> list[str]:
    return replace(directory, "layers.0.self_attn.q_b_proj.weight", lambda t: t[:-1])


def transposed(directory: Path) -> list[str]:
    return replace(directory, "layers.0.mlp.down_proj.weight", lambda t: t.T)


def wrong_shape_of_scales(directory: Path) -> list[str]:
    return replace(directory, "experts.2.down_proj.weight_scale", lambda t: t[:, :-1])


def wrong_weight_shape(directory: Path) -> list[str]:
    return replace(directory, "experts.2.down_proj.weight_shape", lambda t: t.flip(0) + 1)


def wrong_router_bias_shape(directory: Path) -> list[str]:
    return replace(directory, "gate.e_score_correction_bias", lambda t: t[:-1])


def _drop(directory: Path, end: str) -> list[str]:
    name, file = find(directory, end)
    _edit(directory, file, lambda t: t.pop(name))
    index = read_index(directory)
    del index["weight_map"][name]
    write_index(directory, index)
    return [name.removeprefix("language_model.")]  # of a tensor that is not there, nobody knows the prefix


def missing_tensor(directory: Path) -> list[str]:
    return _drop(directory, "layers.1.self_attn.kv_a_layernorm.weight")


def missing_head(directory: Path) -> list[str]:
    return _drop(directory, "lm_head.weight")


def missing_scale(directory: Path) -> list[str]:
    return _drop(directory, "experts.5.up_proj.weight_scale")


def missing_expert(directory: Path) -> list[str]:
    return [_drop(directory, f"experts.7.up_proj.weight_{part}")[0] for part in ("packed", "scale", "shape")][:1]


def add(directory: Path, name: str, tensor: torch.Tensor, file: str, listed: bool = True) -> list[str]:
    _edit(directory, file, lambda t: t.update({name: tensor}))
    if listed:
        index = read_index(directory)
        index["weight_map"][name] = file
        write_index(directory, index)
    return [name, file]


def extra_tensor(directory: Path) -> list[str]:
    name, file = find(directory, "layers.1.self_attn.q_a_proj.weight")
    return add(directory, name.replace("weight", "bias"), torch.zeros(32, dtype=torch.bfloat16), file)


def extra_layer(directory: Path) -> list[str]:
    file = find(directory, "lm_head.weight")[1]
    name = "language_model.model.layers.2.input_layernorm.weight"
    return add(directory, name, torch.ones(64, dtype=torch.bfloat16), file)


def extra_tensor_that_the_index_hides(directory: Path) -> list[str]:
    file = find(directory, "lm_head.weight")[1]
    return add(directory, "language_model.model.surprise.weight", torch.zeros(4), file, listed=False)


def tensor_in_two_shards(directory: Path) -> list[str]:
    name, file = find(directory, "layers.0.input_layernorm.weight")
    tensor = load_file(directory / file)[name]
    other = next(f for f in read_index(directory)["weight_map"].values() if f != file)
    add(directory, name, tensor + 1, other, listed=False)
    return [name]


def plain_and_packed_expert(directory: Path) -> list[str]:
    """One expert's weight both packed and plain: no telling which one counts."""
    name, file = find(directory, "experts.1.gate_proj.weight_packed")
    plain = name.removesuffix("_packed")
    return add(directory, plain, torch.zeros(64, 64, dtype=torch.bfloat16), file)[:1]


def fp8_blocks(directory: Path) -> list[str]:
    """K2-Instruct's weights: FP8 with one scale for each block of 128 x 128. Refused by name."""
    name, file = find(directory, "layers.0.mlp.gate_proj.weight")
    _edit(directory, file, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    add(directory, f"{name}_scale_inv", torch.ones(1, 1), file)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
    edit_config(directory, lambda c: c["text_config"].update(quantization_config=fp8))
    return ["FP8"]


def fp8_blocks_without_a_word_in_the_config(directory: Path) -> list[str]:
    fp8_blocks(directory)
    edit_config(directory, lambda c: c["text_config"].pop("quantization_config"))
    return ["FP8"]


def no_config(directory: Path) -> list[str]:
    (directory / "config.json").unlink()
    return ["config.json"]


def config_is_not_json(directory: Path) -> list[str]:
    (directory / "config.json").write_text("{")
    return ["config.json"]


def config_is_a_list(directory: Path) -> list[str]:
    (directory / "config.json").write_text("[]")
    return ["config.json"]


def config_of_another_model(directory: Path) -> list[str]:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    return ["llama"]


def config_without_kv_lora_rank(directory: Path) -> list[str]:
    edit_config(directory, lambda c: c["text_config"].pop("kv_lora_rank"))
    return ["kv_lora_rank"]


def config_without_hidden_size(directory: Path) -> list[str]:
    edit_config(directory, lambda c: c["text_config"].pop("hidden_size"))
    return ["hidden_size"]


def config_with_a_text_for_a_number(directory: Path) -> list[str]:
    edit_config(directory, lambda c: c["text_config"].update(num_attention_heads="four"))
    return ["num_attention_heads"]


def config_with_another_number_of_experts(directory: Path) -> list[str]:
    edit_config(directory, lambda c: c["text_config"].update(n_routed_experts=9))
    return ["mlp."]


def config_with_more_experts_a_token_than_there_are(directory: Path) -> list[str]:
    edit_config(directory, lambda c: c["text_config"].update(num_experts_per_tok=9))
    return ["num_experts_per_tok"]


def config_with_expert_groups(directory: Path) -> list[str]:
    """Group-limited routing is another model; silently ignoring it would give wrong answers."""
    edit_config(directory, lambda c: c["text_config"].update(n_group=4, topk_group=2))
    return ["n_group"]


def config_with_another_scoring(directory: Path) -> list[str]:
    edit_config(directory, lambda c: c["text_config"].update(scoring_func="softmax"))
    return ["scoring_func", "softmax"]


def config_with_an_unknown_rope(directory: Path) -> list[str]:
    edit_config(directory, lambda c: c["text_config"]["rope_scaling"].update(type="longrope"))
    return ["longrope"]


def no_tokenizer(directory: Path) -> list[str]:
    (directory / "tiktoken.model").unlink()
    return ["tiktoken.model"]


def no_weights(directory: Path) -> list[str]:
    for file in [*directory.glob("*.safetensors"), directory / INDEX]:
        file.unlink()
    return ["safetensors"]


DAMAGES = {
    function.__name__: function
    for function in (
        truncated_by_one_byte,
        truncated_in_the_header,
        empty_shard,
        deleted_shard,
        not_safetensors,
        index_names_a_tensor_no_shard_has,
        index_names_another_shard,
        index_is_not_json,
        index_without_weight_map,
        index_points_outside,
        wrong_dtype,
        wrong_dtype_of_packed_words,
        wrong_shape,
        transposed,
        wrong_shape_of_scales,
        wrong_weight_shape,
        wrong_router_bias_shape,
        missing_tensor,
        missing_head,
        missing_scale,
        missing_expert,
        extra_tensor,
        extra_layer,
        extra_tensor_that_the_index_hides,
        tensor_in_two_shards,
        plain_and_packed_expert,
        fp8_blocks,
        fp8_blocks_without_a_word_in_the_config,
        no_config,
        config_is_not_json,
        config_is_a_list,
        config_of_another_model,
        config_without_kv_lora_rank,
        config_without_hidden_size,
        config_with_a_text_for_a_number,
        config_with_another_number_of_experts,
        config_with_more_experts_a_token_than_there_are,
        config_with_expert_groups,
        config_with_another_scoring,
        config_with_an_unknown_rope,
        no_tokenizer,
        no_weights,
    )
}
