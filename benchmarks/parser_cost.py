"""What the server's own work on text costs: microseconds a token for one stream, on one core.

    python benchmarks/parser_cost.py --json benchmarks/parser_cost_cpu.json

An answer: detokenising with stop strings as the engine does it, then the output parser, then the chunks of a stream as
JSON; a token a step, and 4 as speculation brings them. A prompt: checking, rendering and encoding, a token of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.bench.report import Report, interleave, publish
from engine.chat_template import ChatTemplate
from engine.config import TINY_CHECKPOINT
from engine.request import CompletionDelta
from engine.server.chat_choice import Choice
from engine.server.output_parser import OutputParser
from engine.server.tool_rules import ToolRules
from engine.stop_strings import StopStrings
from engine.tokenizer import IncrementalDecoder, Tokenizer
from models.kimi_k25.tool_declaration import declare_tools

GOAL_US = 50.0
STOPS = ["</answer>", "\n\nUser:", "<|end|>", "Observation:"]
PROSE = "The train left the old station at 9:45, turned north over the river 汉字 😀 and was never late again. "
NAMES = tuple(f"tool_{number}" for number in range(200))
CALL = "<|tool_call_begin|>functions.tool_{0}:{1}<|tool_call_argument_begin|>{2}<|tool_call_end|>"


class Answer(NamedTuple):
    name: str
    steps: list[tuple[list[int], str]]  # token ids and text of each
    num_tokens: int


def answers(tokenizer: Tokenizer, per_step: int) -> list[Answer]:
    """Reasoning with content, one call of 20,000 characters, and many short calls."""
    text = json.dumps({"text": (PROSE * 300)[:20_000]}, ensure_ascii=False)
    many = "".join(CALL.format(number % 200, number, '{"x": 1}') for number in range(300))
    kinds = {
        "reasoning, content": f"{PROSE * 80}</think>{PROSE * 80}",
        "20,000 characters of arguments": f"</think><|tool_calls_section_begin|>{CALL.format(199, 0, text)}",
        "300 calls, 200 tools": f"</think><|tool_calls_section_begin|>{many}<|tool_calls_section_end|>",
    }
    return [_answer(tokenizer, name, script, per_step) for name, script in kinds.items()]


def _answer(tokenizer: Tokenizer, name: str, script: str, per_step: int) -> Answer:
    ids = tokenizer.encode(script, allow_special=True)
    decoder = IncrementalDecoder(tokenizer)
    parts = [ids[start : start + per_step] for start in range(0, len(ids), per_step)]
    return Answer(f"{name}, {per_step} a step", [(part, decoder.push(part)) for part in parts], len(ids))


def timed(work: Callable[[], object], num_tokens: int) -> float:
    """Processor microseconds a token."""
    start = time.process_time_ns()
    work()
    return max(time.process_time_ns() - start, 1) / 1000 / num_tokens


def detokenise(tokenizer: Tokenizer, answer: Answer) -> None:
    decoder, stops = IncrementalDecoder(tokenizer), StopStrings(STOPS)
    for token_ids, _ in answer.steps:
        for token_id in token_ids:
            stops.push(decoder.push([token_id]))


def parser_for(tokenizer: Tokenizer) -> OutputParser:
    return OutputParser(tokenizer, [tokenizer.think_begin_id], ToolRules(NAMES, "auto"), True, True)


def parse(tokenizer: Tokenizer, answer: Answer) -> None:
    parser = parser_for(tokenizer)
    for token_ids, text in answer.steps:
        parser.push(token_ids, text)
    parser.finish("stop", None)


def stream(tokenizer: Tokenizer, answer: Answer) -> None:
    """The parser and what it gives as JSON."""
    choice = Choice(0, parser_for(tokenizer), False)
    for token_ids, text in answer.steps:
        for chunk in choice.chunks(choice.read(CompletionDelta("r", 0, text, token_ids))):
            json.dumps(chunk, ensure_ascii=False)


def conversation() -> list[dict[str, Any]]:
    """Turns with calls under foreign ids, some 100,000 characters."""
    messages: list[dict[str, Any]] = []
    for turn in range(50):
        function = {"name": f"tool_{turn}", "arguments": '{"x": 1}'}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": PROSE * 10},
            {"role": "assistant", "content": None, "reasoning_content": PROSE, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": PROSE * 9},
        ]
    return messages


def tools() -> list[dict[str, Any]]:
    properties = {"x": {"type": "integer", "description": PROSE}, "y": {"type": "array", "items": {"type": "string"}}}
    parameters = {"type": "object", "properties": properties, "required": ["x"]}
    return [
        {"type": "function", "function": {"name": n, "description": PROSE, "parameters": parameters}} for n in NAMES
    ]


def arms(tokenizer: Tokenizer, template: ChatTemplate) -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {}
    for per_step in (1, 4):
        for answer in answers(tokenizer, per_step):
            for name, work in (("detokenise", detokenise), ("parse", parse), ("parse and write chunks", stream)):
                found[f"{name}: {answer.name}"] = lambda work=work, answer=answer: timed(
                    lambda: work(tokenizer, answer), answer.num_tokens
                )
    prompts = {"50 turns": (conversation(), None), "50 turns, 200 tools": (conversation(), tools())}
    prompts["one message of 1 MB"] = ([{"role": "user", "content": PROSE * 10_000}], None)
    for name, (messages, declared) in prompts.items():
        size = len(template.encode(tokenizer, messages, declared))
        found[f"render and encode: {name}, {size} tokens"] = lambda m=messages, d=declared, n=size: timed(
            lambda: template.encode(tokenizer, m, d), n
        )
    return found


def run(rounds: int) -> Report:
    tokenizer = Tokenizer.from_directory(TINY_CHECKPOINT)
    template = ChatTemplate.from_directory(TINY_CHECKPOINT, declare_tools)
    measured = arms(tokenizer, template)
    for arm in measured.values():
        arm()
    rows = [
        {"work": name, "us a token": s.median, "spread": s.spread, "goal": GOAL_US, "reached": s.median < GOAL_US}
        for name, s in interleave(measured, rounds).items()
    ]
    notes = [
        "Processor time of one thread, medians; spread = (largest - smallest) / median. The bundled tokenizer, whose"
    ]
    notes += [
        "tokens are shorter than the full one's, so that more of the cost is that of a token than of its characters."
    ]
    return Report("What parser, detokeniser and template cost a token", rows, notes)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds over all rows (default 9)")
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    publish(run(args.rounds), ["python", "benchmarks/parser_cost.py", *given], args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
