"""`python -m engine.bench cpu`: the engine against transformers' `generate`, both in float32 on the CPU, in one run.

Both arms decode the same prompts greedily for the same number of tokens, on the same checkpoint and threads; throughput
is output tokens over the time of the whole call, prefill included. The arms take turns, and the ratio is of medians.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from engine.bench.report import Report, interleave, model_name
from engine.bench.transformers_arm import TransformersArm
from engine.config import TINY_CHECKPOINT, ConfigError

GOALS = {8: 2.0, 1: 1.5}  # number of prompts -> the ratio to reach
WARM_UP_TOKENS = 4
PROMPTS = (
    "The old lighthouse keeper climbed the stairs every evening and",
    "Water boils at a lower temperature on a mountain because",
    "Dear Anna, thank you for the letter that you sent me last week.",
    "A recipe for bread needs only four things: flour, water, salt and",
    "When the train stopped between two stations, the passengers",
    "The capital of the country lies on a wide river, and its people",
    "To sort a list of numbers, first compare the two that",
    "My dog likes three things more than anything else in the world:",
)


class EngineArm:
    """Greedy decoding of a fixed number of tokens by our own `LLM`."""

    def __init__(self, model: str, prompts: list[str], num_tokens: int, threads: int):
        from engine import LLM, SamplingParams

        self.llm = LLM(model=model, device="cpu", dtype="float32", num_threads=threads)
        self.params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self.warm_up_params = SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        self.prompts = prompts
        self.num_tokens = num_tokens
        self.tokens: list[list[int]] = []

    def prompt_token_ids(self) -> list[list[int]]:
        """The ids that the engine makes of the prompts; the other arm gets the same ones."""
        return [output.prompt_token_ids for output in self.llm.generate(self.prompts, self.warm_up_params)]

    def run(self, num_prompts: int) -> float:
        """Generates for the first `num_prompts` prompts; returns output tokens per second."""
        start = time.perf_counter()
        outputs = self.llm.generate(self.prompts[:num_prompts], self.params)
        elapsed = time.perf_counter() - start
        self.tokens = [output.outputs[0].token_ids for output in outputs]
        return num_prompts * self.num_tokens / elapsed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(TINY_CHECKPOINT), help="checkpoint directory (default: the bundled one)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate for each prompt (default 128)")
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each arm (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of both arms (default 2)")


def first_difference(left: list[int], right: list[int]) -> int | None:
    """The first position where two token lists differ; None where they are equal."""
    if left == right:
        return None
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def measure(ours: EngineArm, theirs: TransformersArm, num_prompts: int, rounds: int) -> dict[str, Any]:
    """One row: throughput of both arms on the first `num_prompts` prompts, their ratio, and whether tokens agree."""
    ours.run(num_prompts), theirs.run(num_prompts)  # warm-up of exactly these sizes
    speed = interleave(
        {"engine": lambda: ours.run(num_prompts), "transformers": lambda: theirs.run(num_prompts)}, rounds
    )
    differences = [first_difference(a, b) for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
    ratio = speed["engine"].median / speed["transformers"].median
    return {
        "prompts": num_prompts,
        "speed": speed,
        "ratio": ratio,
        "goal": GOALS[num_prompts],
        "differences": differences,
    }


def as_row(result: dict[str, Any]) -> dict[str, Any]:
    speed, differences = result["speed"], result["differences"]
    return {
        "prompts": result["prompts"],
        "engine tok/s": speed["engine"].median,
        "spread": speed["engine"].spread,
        "transformers tok/s": speed["transformers"].median,
        "spread ": speed["transformers"].spread,
        "ratio": result["ratio"],
        "goal": result["goal"],
        "reached": result["ratio"] >= result["goal"],
        "same tokens": f"{differences.count(None)} of {len(differences)}",
    }


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    arms = {name: vars(summary) for name, summary in result["speed"].items()}
    return {
        "num_prompts": result["prompts"],
        "tokens_per_second": arms,
        "ratio": result["ratio"],
        "goal": result["goal"],
        "reached": result["ratio"] >= result["goal"],
        "first_difference": result["differences"],
    }


def run(args: argparse.Namespace) -> Report:
    """Raises ConfigError for a setting that cannot be measured."""
    for name, least in (("tokens", 1), ("rounds", 1), ("threads", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name} must be at least {least}, not {getattr(args, name)}.")
    torch.set_num_threads(args.threads)
    ours = EngineArm(args.model, list(PROMPTS), args.tokens, args.threads)
    theirs = TransformersArm(Path(args.model), ours.prompt_token_ids(), args.tokens)
    if torch.get_num_threads() != args.threads:
        raise ConfigError(f"torch runs {torch.get_num_threads()} threads, not the {args.threads} that were asked for.")
    results = [measure(ours, theirs, num_prompts, args.rounds) for num_prompts in GOALS]
    notes = [
        "Output tokens per second of the whole call, median; spread is (largest - smallest) / median.",
        f"transformers: attention {theirs.describe()['attention']}, experts {theirs.describe()['experts']}.",
    ]
    if any(d is not None for result in results for d in result["differences"]):
        notes.append("Tokens differ: see first_difference in the JSON; in float32 only a near-tie may do that.")
    data = {
        "model": model_name(args.model),
        "num_tokens": args.tokens,
        "rounds": args.rounds,
        "transformers_settings": theirs.describe(),
        "results": [as_json(result) for result in results],
    }
    title = f"Greedy decoding, float32, {args.tokens} tokens a prompt, {args.rounds} rounds: {model_name(args.model)}"
    return Report(title, [as_row(result) for result in results], notes, data)
