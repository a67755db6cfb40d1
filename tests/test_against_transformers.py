"""Our engine against an implementation that is not ours: log-probabilities at every position and greedy tokens.

The ten traps of the architecture and where each is tested:
 1. epsilon of the two low-rank norms: test_engine_is_not_in_a_trap, test_low_rank_epsilon_is_a_parameter (here)
 2. softmax scale with mscale squared, cos and sin unscaled: test_engine_is_not_in_a_trap, test_rope_settings_are_read
 3. interleaved rotary pairs: test_engine_is_not_in_a_trap
 4. beta_fast is 32: test_engine_is_not_in_a_trap, test_rope_settings_are_read
 5. offset-binary nibbles, lowest first: test_engine_is_not_in_a_trap; the packer itself in tests/test_oracle.py
 6. a chat turn ends with <|im_end|> though the config says [EOS]: test_every_end_token_stops (here)
 7. no BOS, no default system prompt, the prompt ends in <think>: the tests of the chat template
 8. tools as a TypeScript namespace: the tests of the tool declaration
 9. tool markup ends the reasoning: the tests of the server's output parser
10. names come from the index, with or without prefix: test_every_layout_loads_to_the_same_model (here), and
    tests/engine/test_weights.py for an index that is wrong
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from tests import oracle
from tests.checkpoints import SHAPES, SMALL, TRUE_HEADS, Shape, build_checkpoint, text_tensors, write_tensors
from tests.deviations import FAULTS

TOLERANCE = 1e-3
TOP = 20
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=oracle.NUM_GREEDY, ignore_eos=True, prompt_logprobs=TOP, logprobs=TOP
)


@dataclass
class Reference:
    """A checkpoint, the oracle's greedy tokens, and both classes' log-probabilities over prompt and answer."""

    directory: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: dict[str, list[torch.Tensor]]


def make_reference(directory: Path, shape: Shape, quant: str) -> Reference:
    build_checkpoint(directory, shape, quant=quant, vision=True, shards=3)
    prompts, text = oracle.prompts(), oracle.deepseek_v3(directory)
    tokens = oracle.greedy(text, prompts, oracle.NUM_GREEDY)
    models = {"DeepseekV3ForCausalLM": text, "Kimi_K25ForConditionalGeneration": oracle.kimi_k25(directory)}
    rows = {
        name: [oracle.logprobs(model, p + t) for p, t in zip(prompts, tokens, strict=True)]
        for name, model in models.items()
    }
    return Reference(directory, prompts, tokens, rows)


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    made: dict[tuple[str, str], Reference] = {}

    def get(shape: Shape, quant: str) -> Reference:
        key = (shape.name, quant)
        if key not in made:
            made[key] = make_reference(tmp_path_factory.mktemp("-".join(key)), shape, quant)
        return made[key]

    return get


def load(directory: Path, **settings) -> LLM:
    return LLM(model=str(directory), device="cpu", dtype="float32", num_threads=1, **settings)


def error_of(output, rows_TV: torch.Tensor) -> float:
    """The largest difference of any reported log-probability, after checking that every position reports its own."""
    prompt, answer = output.prompt_token_ids, output.outputs[0]
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
    assert len(answer.logprobs) == len(answer.token_ids)
    reported = output.prompt_logprobs[1:] + answer.logprobs
    worst = 0.0
    for row, token, entries in zip(rows_TV, (prompt + answer.token_ids)[1:], reported, strict=False):
        assert token in entries and TOP <= len(entries) <= TOP + 1
        expected = row[list(entries)]
        worst = max(worst, (expected - torch.tensor([e.logprob for e in entries.values()])).abs().max().item())
        best = sorted((e.logprob for e in entries.values()), reverse=True)[:TOP]
        worst = max(worst, (row.topk(TOP).values - torch.tensor(best)).abs().max().item())
    return worst


def check(outputs, reference: Reference, chosen: list[int]) -> None:
    assert [o.outputs[0].token_ids for o in outputs] == [reference.tokens[i] for i in chosen]
    for name, rows in reference.logprobs.items():
        errors = [error_of(output, rows[i]) for output, i in zip(outputs, chosen, strict=True)]
        assert max(errors) < TOLERANCE, f"{name}: {errors}"


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 48], ids=["whole", "chunked"])
@pytest.mark.parametrize("quant", ["int4", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_logprobs_and_greedy_tokens_equal_transformers(reference, shape, quant, max_num_batched_tokens):
    """Prompts of 1, 5, 64, 65 and 200 tokens, together in one batch and each alone."""
    ref = reference(shape, quant)
    llm = load(ref.directory, max_num_batched_tokens=max_num_batched_tokens)
    every = range(len(ref.prompts))
    check(llm.generate(ref.prompts, PARAMS), ref, every)
    for i in every:
        check(llm.generate([ref.prompts[i]], PARAMS), ref, [i])


@pytest.fixture(scope="session")
def true_heads_run(reference):
    """One answer of ours on the checkpoint with the true head sizes."""
    ref = reference(TRUE_HEADS, "int4")
    return ref, load(ref.directory).generate([ref.prompts[-1]], PARAMS)[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_engine_is_not_in_a_trap(true_heads_run, fault):
    """Close to the oracle, and far from the oracle with this mistake planted in it."""
    ref, output = true_heads_run
    ids = ref.prompts[-1] + ref.tokens[-1]
    assert error_of(output, ref.logprobs["DeepseekV3ForCausalLM"][-1]) < TOLERANCE
    assert error_of(output, oracle.logprobs(FAULTS[fault](ref.directory), ids)) > 10 * TOLERANCE


def close_to(llm: LLM, model, prompt: list[int]) -> float:
    output = llm.generate([prompt], PARAMS)[0]
    return error_of(output, oracle.logprobs(model, prompt + output.outputs[0].token_ids))


def test_low_rank_epsilon_is_a_parameter(reference):
    """1e-5 through hf_overrides equals transformers patched to 1e-5, and differs from the default."""
    ref = reference(TRUE_HEADS, "int4")
    llm = load(ref.directory, hf_overrides={"low_rank_norm_eps": 1e-5})
    assert close_to(llm, FAULTS["trap_1_low_rank_epsilon"](ref.directory), ref.prompts[-1]) < TOLERANCE
    assert close_to(llm, oracle.deepseek_v3(ref.directory), ref.prompts[-1]) > 10 * TOLERANCE


OTHER_ROPES = {
    "beta_fast_1": {"beta_fast": 1.0},
    "factor_32": {"factor": 32.0},
    "mscale_all_dim_0": {"mscale_all_dim": 0.0},
    "mscale_not_mscale_all_dim": {"mscale": 0.7, "mscale_all_dim": 1.3},
}


@pytest.mark.parametrize("change", OTHER_ROPES.values(), ids=OTHER_ROPES)
def test_rope_settings_are_read(tmp_path, change):
    """Nothing of YaRN is hard-coded: another setting in the config gives transformers' other answer."""
    directory = build_checkpoint(tmp_path, SMALL)
    config = json.loads((directory / "config.json").read_text())
    before = oracle.logprobs(oracle.deepseek_v3(directory), oracle.prompts()[-1])
    config["text_config"]["rope_scaling"].update(change)
    (directory / "config.json").write_text(json.dumps(config))
    changed = oracle.deepseek_v3(directory)
    assert (oracle.logprobs(changed, oracle.prompts()[-1]) - before).abs().max() > 10 * TOLERANCE
    assert close_to(load(directory), changed, oracle.prompts()[-1]) < TOLERANCE


LAYOUTS = {
    "rope_parameters": {"rope_spelling": "rope_parameters"},
    "torch_dtype": {"dtype_key": "torch_dtype"},
    "no_prefix": {"prefix": ""},
    "kimi_k2": {"wrapper": "kimi_k2", "prefix": ""},
    "kimi_k2_rope_parameters_torch_dtype": {
        "wrapper": "kimi_k2",
        "prefix": "",
        "rope_spelling": "rope_parameters",
        "dtype_key": "torch_dtype",
    },
    "kimi_k2_with_prefix": {"wrapper": "kimi_k2"},
    "deepseek_v3": {"wrapper": "deepseek_v3", "prefix": ""},
    "deepseek_v3_rope_parameters": {"wrapper": "deepseek_v3", "prefix": "", "rope_spelling": "rope_parameters"},
    "one_file_no_index": {"index": False},
    "seven_shards": {"shards": 7},
    "weight_shape_int64": {"shape_dtype": torch.int64},
    "vision": {"vision": True, "shards": 3},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = build_checkpoint(tmp_path_factory.mktemp("plain"), SMALL)
    return load(directory).generate(oracle.prompts()[1:3], PARAMS)


def same(left, right) -> bool:
    return all(
        a.outputs[0].token_ids == b.outputs[0].token_ids
        and a.prompt_logprobs == b.prompt_logprobs
        and a.outputs[0].logprobs == b.outputs[0].logprobs
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_b152_every_layout_loads_to_the_same_model(tmp_path, plain, layout):
    """The same weights in another wrapper, spelling, prefix or split give the same bits."""
    assert same(load(build_checkpoint(tmp_path, SMALL, **layout)).generate(oracle.prompts()[1:3], PARAMS), plain)


def test_files_are_found_by_the_index_alone(tmp_path, plain):
    """Trap 10: shards under names that no pattern would build."""
    build_checkpoint(tmp_path, SMALL, shards=3)
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    for i, name in enumerate(sorted(set(index["weight_map"].values()))):
        (tmp_path / name).rename(tmp_path / f"part{i}.safetensors")
        index["weight_map"] = {k: f"part{i}.safetensors" if v == name else v for k, v in index["weight_map"].items()}
    index_file.write_text(json.dumps(index))
    assert same(load(tmp_path).generate(oracle.prompts()[1:3], PARAMS), plain)


def test_b151_vision_tensors_are_skipped_with_one_line(tmp_path, caplog):
    build_checkpoint(tmp_path, SMALL, vision=True, shards=3)
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    lines = [r.getMessage() for r in caplog.records if "vision" in r.getMessage().lower()]
    assert len(lines) == 1 and "\n" not in lines[0]


@pytest.mark.parametrize("end", ["[EOS]", "<|im_end|>", "[EOT]"])
def test_every_end_token_stops(tmp_path, end):
    """Trap 6: the config names [EOS] alone, a chat turn ends with <|im_end|>, and [EOT] ends an answer too."""
    end_id = SMALL.num_ranks + {"[EOS]": 1, "<|im_end|>": 2, "[EOT]": 9}[end]
    build_checkpoint(tmp_path, SMALL)
    prompt = oracle.prompts()[1]
    first = oracle.greedy(oracle.deepseek_v3(tmp_path), [prompt], 1)[0][0]
    tensors = text_tensors(SMALL, 0, "int4")
    tensors["lm_head.weight"][end_id] = 2 * tensors["lm_head.weight"][first]  # now the end token wins there
    write_tensors(tmp_path, {"language_model." + k: v for k, v in tensors.items()}, 1, True)

    llm = load(tmp_path)
    answer = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0]
    assert answer.finish_reason == "stop" and answer.token_ids in ([], [end_id]) and answer.text == ""
    ignored = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].outputs[0]
    assert ignored.finish_reason == "length" and len(ignored.token_ids) == 8 and ignored.token_ids[0] == end_id
