"""What grammars cost the host: compiling one, and the masks of a step of eight answers.

    python benchmarks/grammar_masks.py --json FILE

Eight answers of one grammar are read token by token. A step takes the token that each has got and fills each one's
mask. Its time is the least of some rounds with new answers, so that what else the machine does counts little, and what
an answer pays where it meets a state first does; shown are median, mean and worst of an answer's steps. Vocabularies
are made up: all bytes, then short lower-case words, the sizes those of the bundled and of the full checkpoint. Where
xgrammar is installed it does the same beside it, but for the tool section, which needs token ids in a grammar.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine import sampling
from engine.bench.report import Report, publish
from engine.grammar import GrammarCompiler, Grammars
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.structured_outputs import StructuredOutputs
from engine.tokenizer import Tokenizer

BATCH = 8
ROUNDS = 10
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
PERSON_TEXT = (
    '{"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", "a long winded text about analytical machines"], '
    '"address": {"street": "12 Main street", "zip": "12345"}}'
)
DATE = r"[a-z]+ [0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}Z( [a-z]+)*"


class Case(NamedTuple):
    structured: StructuredOutputs
    token_ids: list[int]


class Timed(NamedTuple):
    """Seconds: of one compilation, and of each step."""

    compile: float
    steps: list[float]


def cases(tokenizer: Tokenizer) -> dict[str, Case]:
    t, encode = tokenizer, tokenizer.encode
    begin, end = t.tool_section_begin_id, t.tool_section_end_id
    tool = f'<[{t.tool_call_begin_id}]> "functions.save:" /[0-9]+/ <[{t.tool_argument_begin_id}]> arguments '
    section = f"start: <[{begin}]> call+ <[{end}]>\ncall: {tool} <[{t.tool_call_end_id}]>\n"
    call = [t.tool_call_begin_id, *encode("functions.save:0"), t.tool_argument_begin_id, *encode(PERSON_TEXT)]
    return {
        "json_object": Case(StructuredOutputs(json_object=True), encode(PERSON_TEXT)),
        "nested schema": Case(StructuredOutputs(json=PERSON), encode(PERSON_TEXT)),
        "regex": Case(StructuredOutputs(regex=DATE), encode("since 2024-11-30T12:00Z and some more words")),
        "tool section": Case(
            StructuredOutputs(grammar=f"{section}arguments: %json {json.dumps(PERSON)}\n"),
            [begin, *call, t.tool_call_end_id, end],
        ),
    }


def _clock(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def ours(tokenizer: Tokenizer, case: Case, num_guesses: int = 0) -> Timed:
    """num_guesses: rows behind guesses of the answer's own next tokens, for each answer."""
    compiler = GrammarCompiler(tokenizer)
    compiler.submit(StructuredOutputs(regex="a")).result()  # makes the vocabulary
    seconds = _clock(lambda: compiler.submit(case.structured).result())
    grammars, rounds = Grammars(tokenizer, tokenizer.vocab_size), []
    grammars.check(case.structured)
    for _ in range(ROUNDS):
        params = SamplingParams(structured_outputs=case.structured)
        ends = frozenset([tokenizer.eos_id])
        requests, steps = [Request(str(i), [1], params, 0, 1, ends) for i in range(BATCH)], []
        for place, token_id in enumerate(case.token_ids):
            guesses = [case.token_ids[place : place + num_guesses]] * BATCH
            steps.append(_clock(lambda: grammars.masks(requests, guesses, num_guesses + 1)))  # noqa: B023
            for request in requests:
                request.output_token_ids.append(token_id)
        rounds.append(steps)
    return Timed(seconds, list(map(min, zip(*rounds, strict=True))))


def theirs(tokenizer: Tokenizer, case: Case) -> Timed | None:
    """xgrammar's; None for what it cannot express."""
    import xgrammar

    words = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    info = xgrammar.TokenizerInfo(words, stop_token_ids=[tokenizer.eos_id])
    compiler, structured = xgrammar.GrammarCompiler(info, max_threads=1), case.structured
    compile_it = {
        "json_object": lambda: compiler.compile_json_schema('{"type": "object"}'),
        "json": lambda: compiler.compile_json_schema(structured.json, any_whitespace=True),
        "regex": lambda: compiler.compile_regex(structured.regex),
    }.get(structured.kind)
    if compile_it is None:
        return None
    started = time.perf_counter()
    compiled = compile_it()
    seconds, rounds = time.perf_counter() - started, []
    bitmask = xgrammar.allocate_token_bitmask(BATCH, tokenizer.vocab_size)
    for _ in range(ROUNDS):
        matchers = [xgrammar.GrammarMatcher(compiled) for _ in range(BATCH)]
        last, steps = None, []

        def step(matchers: list, last: int | None) -> None:
            for row, matcher in enumerate(matchers):
                if last is not None and not matcher.accept_token(last):
                    raise AssertionError("the text does not match")
                matcher.fill_next_token_bitmask(bitmask, row)

        for token_id in case.token_ids:
            steps.append(_clock(lambda: step(matchers, last)))  # noqa: B023
            last = token_id
        rounds.append(steps)
    return Timed(seconds, list(map(min, zip(*rounds, strict=True))))


def apply_seconds(vocab_size: int) -> float:
    """Of eight rows of logits on this device, the fastest of some."""
    logits_MV = torch.randn(BATCH, vocab_size)
    masks_RB = torch.from_numpy(np.full((BATCH, vocab_size // 32 + 1), 1, dtype=np.int32))
    rows_R = torch.arange(BATCH)
    return min(_clock(lambda: sampling.forbid(logits_MV, rows_R, masks_RB)) for _ in range(20))


def row(vocab_size: int, name: str, library: str, timed: Timed, num_guesses: int = 0) -> dict[str, Any]:
    median = statistics.median(timed.steps) * 1e6
    return {
        "entries": vocab_size,
        "grammar": name,
        "guesses": num_guesses,
        "library": library,
        "compile ms": timed.compile * 1e3,
        "step us": median,
        "row us": median / BATCH / (1 + num_guesses),
        "mean us": statistics.mean(timed.steps) * 1e6,
        "worst us": max(timed.steps) * 1e6,
    }


def measure(sizes: list[int]) -> Report:
    rows, notes = [], []
    has_xgrammar = importlib.util.find_spec("xgrammar") is not None
    for size in sizes:
        tokenizer = Tokenizer.synthetic(size)
        for name, case in cases(tokenizer).items():
            rows.append(row(size, name, "llguidance", ours(tokenizer, case)))
            rows.append(row(size, name, "llguidance", ours(tokenizer, case, 3), 3))
            other = theirs(tokenizer, case) if has_xgrammar else None
            if other is not None:
                rows.append(row(size, name, "xgrammar", other))
        notes.append(f"Applied to eight rows of {size} logits on the CPU: {apply_seconds(size) * 1e6:.0f} us.")
    return Report(f"Masks of {BATCH} answers that must match", rows, notes)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 163840], help="entries of the vocabularies")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    given = sys.argv[1:] if arguments is None else arguments
    publish(measure(options.sizes), ["python", "benchmarks/grammar_masks.py", *given], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
