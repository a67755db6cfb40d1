"""Hostile ways to break a checkpoint directory: absurd numbers, endless nesting, things that are no files."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.damage import INDEX, edit_config, find, read_index, replace, write_index


def _update_config(directory: Path, **values) -> list[str]:
    edit_config(directory, lambda c: c["text_config"].update(values))
    return list(values)


def config_of_more_layers_than_memory(directory: Path) -> list[str]:
    return _update_config(directory, num_hidden_layers=10**18)


def config_of_more_layers_than_tensors(directory: Path) -> list[str]:
    return _update_config(directory, num_hidden_layers=200_000)


def config_of_more_experts_than_tensors(directory: Path) -> list[str]:
    return _update_config(directory, n_routed_experts=200_000)


def config_of_a_width_that_overflows(directory: Path) -> list[str]:
    return _update_config(directory, hidden_size=10**18)


def config_with_an_infinite_count(directory: Path) -> list[str]:
    return _update_config(directory, first_k_dense_replace=float("inf"))


def config_with_a_scale_that_no_float_holds(directory: Path) -> list[str]:
    return _update_config(directory, routed_scaling_factor=10**400)


def config_with_a_text_for_a_flag(directory: Path) -> list[str]:
    return _update_config(directory, norm_topk_prob="false")


def config_with_an_end_outside_the_vocabulary(directory: Path) -> list[str]:
    return _update_config(directory, eos_token_id=[10**9])


def config_with_a_rope_that_divides_by_zero(directory: Path) -> list[str]:
    edit_config(directory, lambda c: c["text_config"]["rope_scaling"].update(type="yarn", factor=4, beta_fast=0))
    return ["beta_fast"]


def config_nested_without_end(directory: Path) -> list[str]:
    (directory / "config.json").write_text("[" * 200_000)
    return ["config.json", "nested"]


def index_nested_without_end(directory: Path) -> list[str]:
    (directory / INDEX).write_text("[" * 200_000)
    return [INDEX, "nested"]


def index_names_an_impossible_file(directory: Path) -> list[str]:
    index = read_index(directory)
    index["weight_map"][find(directory, "lm_head.weight")[0]] = "x" * 5000
    write_index(directory, index)
    return [INDEX]


def tokenizer_is_a_pipe(directory: Path) -> list[str]:
    (directory / "tiktoken.model").unlink()
    os.mkfifo(directory / "tiktoken.model")
    return ["tiktoken.model", "regular file"]


def generation_config_out_of_range(directory: Path) -> list[str]:
    (directory / "generation_config.json").write_text('{"temperature": 1e400}')
    return ["generation_config.json", "temperature"]


def generation_config_with_an_end_outside_the_vocabulary(directory: Path) -> list[str]:
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 1000000]}')
    return ["generation_config.json", "eos_token_id"]


def weight_that_is_not_a_number(directory: Path) -> list[str]:
    return replace(
        directory, "layers.0.self_attn.o_proj.weight", lambda t: t.index_fill(0, torch.tensor([1]), torch.nan)
    )


def infinite_scale(directory: Path) -> list[str]:
    return replace(directory, "experts.2.down_proj.weight_scale", lambda t: t.fill_(torch.inf))


def template_of_too_many_levels(directory: Path) -> list[str]:
    (directory / "chat_template.jinja").write_text("{% for i in [1] %}" * 30 + "{% endfor %}" * 30)
    return ["chat_template.jinja"]


def template_nested_without_end(directory: Path) -> list[str]:
    (directory / "chat_template.jinja").write_text("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}")
    return ["chat_template.jinja"]


HOSTILE = {
    function.__name__: function
    for function in (
        config_of_more_layers_than_memory,
        config_of_more_layers_than_tensors,
        config_of_more_experts_than_tensors,
        config_of_a_width_that_overflows,
        config_with_an_infinite_count,
        config_with_a_scale_that_no_float_holds,
        config_with_a_text_for_a_flag,
        config_with_an_end_outside_the_vocabulary,
        config_with_a_rope_that_divides_by_zero,
        config_nested_without_end,
        index_nested_without_end,
        index_names_an_impossible_file,
        tokenizer_is_a_pipe,
        generation_config_out_of_range,
        generation_config_with_an_end_outside_the_vocabulary,
        weight_that_is_not_a_number,
        infinite_scale,
        template_of_too_many_levels,
        template_nested_without_end,
    )
}
