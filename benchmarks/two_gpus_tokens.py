"""Greedy tokens of every dispatcher on two ranks, with a draft and without, against one rank's and each other's.

In float32 all are the same. In bfloat16 those of one rounding family and placement are the same up to 64 rows, guesses
included; others may part from one rank's where the two tokens are nearly even: the gap between their
log-probabilities, scored by one rank, is at most MAX_GAP. As a script: one engine of one rank, its settings from the
command line, its answer the last line.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import Any

import torch

from benchmarks.ranks import ROOT, environment
from engine.comm.dispatcher import dispatcher_class
from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_files import ModelFiles
from engine.model_loading import open_checkpoint
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams

MAX_GAP = 0.5
_TOP = 20
_TAIL = 2000
PROMPTS = [
    "The sea was calm, and the old man",
    "What is 17 + 25?",
    "The",
    "Once upon a time there was a small boat on a long river. " * 4,
    "<|im_user|>user<|im_middle|>What is 12 + 30?<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
    [5, 6, 7] * 40,
    "A list of cities: Paris, London,",
    "def add(a, b):",
]


def generate(settings: dict[str, Any], prompts: list, num_tokens: int, seconds: float, logprobs: int | None = None):
    """The engine's answer to `prompts`: [{"prompt": ids, "tokens": ids, "logprobs": one {id: logprob} a token}].

    Raises RuntimeError with the end of its output where it fails."""
    arguments = json.dumps({"settings": settings, "prompts": prompts, "num_tokens": num_tokens, "logprobs": logprobs})
    command = [sys.executable, "-m", "benchmarks.two_gpus_tokens", arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"the engine of {settings} failed:\n{done.stderr[-_TAIL:]}")
    return json.loads(done.stdout.splitlines()[-1])


def tokens_of_rank(
    parallel: ParallelState, settings: dict[str, Any], modes: list[str], prompts: list, num_tokens: int
) -> dict[str, dict[str, Any]]:
    """Mode -> {"answer": as `generate` gives it, without logprobs, "accepted": guesses that were right}.

    modes: "eager" or "graphs", and " eagle3" behind it for the model's draft. Every rank runs an engine of its own,
    which stay together since nothing in them looks at a clock: as many guesses as there are, steps of any length."""
    return {mode: _answer_of_rank(parallel, settings | _settings_of(mode), prompts, num_tokens) for mode in modes}


def _settings_of(mode: str) -> dict[str, Any]:
    words = mode.split()
    draft = "auto" if "eagle3" in words else None
    return {"enforce_eager": "eager" in words, "draft": draft, "adaptive_draft_tokens": False, "max_step_ms": 0}


def _answer_of_rank(
    parallel: ParallelState, settings: dict[str, Any], prompts: list, num_tokens: int
) -> dict[str, Any]:
    config = EngineConfig(**settings, tp=parallel.tp, ep=parallel.ep).resolve(torch.cuda.device_count())
    files = ModelFiles.read(config)
    runner = ModelRunner(config, files, parallel, open_checkpoint(config, files))
    core = EngineCore(config, files, runner)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    answer = {}
    for number, prompt in enumerate(prompts):
        ids = files.tokenizer.encode(prompt, allow_special=True) if isinstance(prompt, str) else prompt
        core.add_request(str(number), ids, params)
        answer[str(number)] = {"prompt": ids, "tokens": []}
    while core.has_unfinished():
        for delta in core.step():
            answer[delta.request_id]["tokens"] += delta.token_ids
    spec = core.stats().speculation
    runner.close()
    del core, runner
    gc.collect()  # graphs that hold a communicator, and their memory, go before the next engine comes
    return {"answer": list(answer.values()), "accepted": None if spec is None else spec.num_accepted_tokens}


def compare_exactly(answers: dict[str, list[dict]], expected: list[dict]) -> dict[str, Any]:
    """Which answers are not those of one rank, token for token."""
    wrong = [key for key, answer in answers.items() if _tokens(answer) != _tokens(expected)]
    return {"passed": not wrong, "compared": len(answers), "different": wrong}


def compare_families(
    answers: dict[str, list[dict]], expected: list[dict], settings: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """answers: by "ep dispatcher mode", a mode of one word or two. Scores every parting from `expected` with an engine
    of `settings`."""
    first_of: dict[tuple[str, str], str] = {}
    torn = []
    for key in answers:
        ep, dispatcher, _ = key.split(maxsplit=2)
        first = first_of.setdefault((ep, dispatcher_class(dispatcher).family), key)
        if _tokens(answers[key]) != _tokens(answers[first]):
            torn.append([first, key])
    partings = [one for key in first_of.values() for one in _partings(key, answers[key], expected)]
    if partings:
        scored = generate(settings, [one["prefix"] for one in partings], 1, seconds, _TOP)
        for one, score in zip(partings, scored, strict=True):
            one["gap"] = _gap(score["logprobs"][0], one["tokens"])
            del one["prefix"]
    wide = [one for one in partings if one["gap"] is None or one["gap"] > MAX_GAP]
    return {
        "passed": not torn and not wide,
        "compared": len(answers),
        "families": sorted(" ".join(name) for name in first_of),
        "different_within_a_family": torn,
        "max_gap_allowed": MAX_GAP,
        "answers": len(expected) * len(first_of),
        "partings": partings,
        "partings_too_wide": len(wide),
    }


def _partings(key: str, answer: list[dict], expected: list[dict]) -> list[dict[str, Any]]:
    """Where an answer first leaves the expected one, a prompt each."""
    found = []
    for number, (ours, theirs) in enumerate(zip(answer, expected, strict=True)):
        pairs = zip(ours["tokens"], theirs["tokens"], strict=True)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:
            tokens = [ours["tokens"][place], theirs["tokens"][place]]
            prefix = ours["prompt"] + ours["tokens"][:place]
            found.append({"run": key, "prompt": number, "place": place, "tokens": tokens, "prefix": prefix})
    return found


def _gap(logprobs: dict[str, float], tokens: list[int]) -> float | None:
    """None where one of the tokens is not among the best."""
    scores = [logprobs.get(str(token)) for token in tokens]
    return None if None in scores else abs(scores[0] - scores[1])


def _tokens(answer: list[dict]) -> list[list[int]]:
    return [one["tokens"] for one in answer]


def main() -> None:
    from engine import LLM

    asked = json.loads(sys.argv[1])
    params = SamplingParams(
        temperature=0.0, max_tokens=asked["num_tokens"], ignore_eos=True, logprobs=asked["logprobs"]
    )
    with LLM(**asked["settings"]) as llm:
        outputs = llm.generate(asked["prompts"], params)
    answers = [
        {
            "prompt": list(output.prompt_token_ids),
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [{t: p.logprob for t, p in row.items()} for row in output.outputs[0].logprobs or []],
        }
        for output in outputs
    ]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
