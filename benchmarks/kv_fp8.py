"""What a KV cache in FP8 costs in accuracy, and what other scales than its own would.

    python benchmarks/kv_fp8.py --json FILE                  # the trained tiny model on the CPU, in float32
    python benchmarks/kv_fp8.py --device cuda --json FILE    # in bfloat16, with the kernels

texts: held-out prompts and the answers that the model with a plain cache gives them, greedily. Both caches score every
token: perplexity, the mean divergence KL(plain || fp8) of the next token's distribution, how often both name the same
likeliest token; and how many answers stay the same when the model with the FP8 cache writes its own.
attention: one layer at Kimi-K2.5's widths (8 heads over 4096 keys) over normed latents: the relative error of its
output against float32 over exact rows. Rows are those of the trained model's layers, which has K2.5's widths, or made
up: Gaussian, heavy-tailed, or Gaussian with channels 30 times as large.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.bench.report import environment, format_table
from engine.bench.spec_text import PROMPTS, read_prompts
from engine.config import TINY_CHECKPOINT, EngineConfig
from engine.core import EngineCore
from engine.kernels import kv_layout, reference
from engine.launch import start_engine
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledRequest, SchedulerOutput
from tests.answers import ask
from tests.mla_cases import DecodeCase, decode_case, expected_decode, relative_error

LATENT, ROPE, HEADS, KEYS, SCALE = 512, 64, 8, 4096, 192**-0.5
MADE_UP = ("gaussian", "heavy-tailed", "large channels")


def engine(device: str, kv_cache_dtype: str) -> EngineCore:
    settings = {"device": device, "kv_cache_memory_gb": 0.5, "max_model_len": 1024, "max_num_batched_tokens": 1024}
    config = EngineConfig(str(TINY_CHECKPOINT), kv_cache_dtype=kv_cache_dtype, num_threads=1, **settings)
    return start_engine(config)[0]


@torch.inference_mode()
def log_probs(core: EngineCore, token_ids: list[int]) -> torch.Tensor:
    """Of all tokens after each but the last, float32 [T - 1, V]: one step over the whole text."""
    runner = core.replica.runner
    blocks = list(range(1, -(-len(token_ids) // 64) + 1))
    request = Request("text", token_ids, SamplingParams(), 0, 1, block_ids=blocks)
    step = SchedulerOutput([ScheduledRequest.next_of(request, len(token_ids))])
    batch = runner.input_batch.build(step, runner.dispatchers.for_rows(step.num_tokens))
    hidden_TD = runner.model(batch, runner.caches)
    return runner.model.logits(hidden_TD[:-1]).float().log_softmax(-1)


def trained_rows(core: EngineCore, texts: list[list[int]]) -> list[torch.Tensor]:
    """Of each layer the cache rows of several texts, float32 [KEYS, C + R]."""
    found, count = [], 0
    for text in texts:
        log_probs(core, text)
        used = core.replica.runner.caches[:, 1 : 2 + len(text) // 64]
        found.append(used.flatten(1, 2)[:, : len(text)].float().cpu())
        count += len(text)
        if count >= KEYS:
            return list(torch.cat(found, 1)[:, :KEYS])
    raise ValueError(f"the texts have {count} tokens, fewer than {KEYS}; take more with --prompts.")


def compare(plain: torch.Tensor, ours: torch.Tensor, token_ids: list[int]) -> dict[str, torch.Tensor]:
    """Token by token."""
    targets = torch.tensor(token_ids[1:], device=plain.device).unsqueeze(1)
    return {
        "plain": plain.gather(1, targets).squeeze(1),
        "fp8": ours.gather(1, targets).squeeze(1),
        "kl": (plain.exp() * (plain - ours)).sum(-1),
        "same": (plain.argmax(-1) == ours.argmax(-1)).double(),
    }


def measure_texts(plain: EngineCore, ours: EngineCore, asked: list[list[int]], tokens: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    answers, others = (
        [answer.token_ids for answer in ask(core, *((ids, params) for ids in asked))] for core in (plain, ours)
    )
    rows = []
    for prompt, answer in zip(asked, answers, strict=True):
        text = [*prompt, *answer]
        rows.append(compare(log_probs(plain, text), log_probs(ours, text), text))
    found = {name: torch.cat([row[name] for row in rows]).double() for name in rows[0]}
    perplexity = {name: math.exp(-float(found[name].mean())) for name in ("plain", "fp8")}
    shared = [_common(one, other) / max(len(one), 1) for one, other in zip(answers, others, strict=True)]
    return {
        "prompts": len(asked),
        "tokens": len(found["kl"]),
        "perplexity plain": perplexity["plain"],
        "perplexity fp8": perplexity["fp8"],
        "perplexity ratio": perplexity["fp8"] / perplexity["plain"],
        "mean KL": float(found["kl"].mean()),
        "median KL": float(found["kl"].median()),
        "99th percentile KL": float(found["kl"].quantile(0.99)),
        "same likeliest token": float(found["same"].mean()),
        "answers unchanged": sum(a == b for a, b in zip(answers, others, strict=True)) / len(answers),
        "unchanged beginning": sum(shared) / len(shared),
    }


def _common(one: list[int], other: list[int]) -> int:
    """Tokens up to the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def latents(kind: str, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    """[L, C]: RMS-normed, times a norm weight around one."""
    x = torch.randn(num_rows, LATENT, generator=generator)
    if kind == "heavy-tailed":
        x = x / torch.rand(num_rows, LATENT, generator=generator).clamp(min=0.01).sqrt()
    elif kind == "large channels":
        x[:, :: LATENT // 4] *= 30
    return reference.rms_norm(x, 1 + 0.2 * torch.randn(LATENT, generator=generator), 1e-6)


def scaled(x: torch.Tensor, group: int, power_of_two: bool) -> torch.Tensor:
    """Rounded to FP8 with a scale for each `group` numbers of a row."""
    grouped = x.unflatten(-1, (-1, group))
    largest = grouped.abs().amax(-1, keepdim=True)
    scale = kv_layout.row_scales(largest)[0] if power_of_two else largest / 448
    return ((grouped / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


SCALES = {
    "none": lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn).float(),
    "a row, power of two": lambda x: scaled(x, LATENT, True),
    "a row": lambda x: scaled(x, LATENT, False),
    "128 numbers": lambda x: scaled(x, 128, False),
}


def made_up_rows(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.cat([latents(kind, KEYS, generator), torch.randn(KEYS, ROPE, generator=generator)], 1)


def attention_case(rows: torch.Tensor, device: str) -> DecodeCase:
    """A query token of each of 8 heads over 4096 keys; scores have a deviation of about 2, so that some keys count."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = {"latent": LATENT, "rope": ROPE, "values": 128, "page": 64, "heads": HEADS, "dtype": dtype}
    case = decode_case([1], [KEYS], **shape)
    case.cache[case.block_table_NB[0]] = rows.to(dtype).view(-1, 64, LATENT + ROPE)
    case.q_THX = (case.q_THX * (2 / (SCALE * float(rows.norm(dim=1).mean())))).to(dtype)
    tensors = {name: x.to(device) for name, x in vars(case).items() if isinstance(x, torch.Tensor)}
    return replace(case, **tensors)


def attend(case: DecodeCase, device: str) -> torch.Tensor:
    """By the engine's own kernel, or its twin."""
    if device == "cuda":
        from engine.kernels.gpu.mla_decode import mla_decode

        return mla_decode(*case.arguments(SCALE))
    out_THC = reference.mla_paged(case.q_THX, case.cache, case.block_table_NB, [1], [KEYS], SCALE, LATENT)
    return torch.einsum("thc,hvc->thv", out_THC, case.w_v_HVC)


def measure_attention(device: str, trained: list[torch.Tensor]) -> Iterator[dict[str, Any]]:
    cases = {f"trained, layer {i}": rows for i, rows in enumerate(trained)}
    cases |= {kind: made_up_rows(kind) for kind in MADE_UP}
    for kind, rows in cases.items():
        case = attention_case(rows, device)
        exact = expected_decode(case, SCALE)
        used = case.cache[case.block_table_NB[0]]
        row = {"latents": kind, "plain cache": relative_error(attend(case, device), exact)}
        cache = kv_layout.FP8.pack(case.cache, LATENT)
        row["fp8 cache"] = relative_error(attend(replace(case, cache=cache), device), exact)
        for name, round_to in SCALES.items():
            rounded = case.cache.clone()
            rounded[case.block_table_NB[0], :, :LATENT] = round_to(used[..., :LATENT].float()).to(rounded.dtype)
            row[f"scale of {name}"] = relative_error(expected_decode(replace(case, cache=rounded), SCALE), exact)
        yield row


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompts", type=int, default=99, help="of each source, at most (default 99)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most (default 64)")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    torch.set_num_threads(1)
    asked = [ids for group in read_prompts(PROMPTS, args.prompts).values() for ids in group]
    plain, ours = engine(args.device, "auto"), engine(args.device, "fp8")
    texts = measure_texts(plain, ours, asked, args.tokens)
    rows = list(measure_attention(args.device, trained_rows(plain, asked)))
    print(f"{format_table([texts])}\n\n{format_table(rows)}")
    if args.json:
        facts = environment(["python", "benchmarks/kv_fp8.py", *(sys.argv[1:] if given is None else given)])
        told = {"model": "models/kimi_k25/tiny", "texts": texts, "attention": rows}
        Path(args.json).write_text(json.dumps(facts | told, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
