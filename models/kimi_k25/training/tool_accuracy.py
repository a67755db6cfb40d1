"""How often greedy calls of invented, unseen tools are exactly right: the declared name, the asked-for arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from models.kimi_k25.training.documents import user
from models.kimi_k25.training.generation import greedy, stop_ids
from models.kimi_k25.training.model import TinyKimi
from models.kimi_k25.training.rendering import Renderer

MAX_NEW = {True: 128, False: 96}
QUICK_QUESTIONS = 4
_CALL = re.compile(
    r"<\|tool_call_begin\|>functions\.([\w.-]+):\d+<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", re.DOTALL
)


def called_tools(text: str) -> list[tuple[str, dict]]:
    """(name, arguments) of every call in the text; raises ValueError for arguments that are not JSON."""
    return [(name, json.loads(arguments)) for name, arguments in _CALL.findall(text)]


def tool_accuracy(
    model: TinyKimi, renderer: Renderer, questions: list[dict], device: torch.device
) -> dict[str, dict[str, float]]:
    """By mode: shares of the questions whose only call has the right name, and also exactly the right arguments.

    A question is {"question", "tools", "name", "arguments"}, where name and arguments are those of the right call.
    """
    model.int4.fill_(1.0)
    shares = {}
    for thinking in (True, False):
        prompts = [
            renderer.template.encode(renderer.tokenizer, [user(q["question"])], q["tools"], thinking=thinking)
            for q in questions
        ]
        written = greedy(model, prompts, stop_ids(model), MAX_NEW[thinking], device)
        texts = [renderer.tokenizer.decode(ids, skip_special_tokens=False) for ids in written]
        right = [grade(text, q["name"], q["arguments"]) for text, q in zip(texts, questions, strict=True)]
        names, calls = (sum(column) / len(questions) for column in zip(*right, strict=True))
        shares["thinking" if thinking else "instant"] = {"name": round(names, 3), "call": round(calls, 3)}
    return shares


def grade(text: str, name: str, arguments: dict) -> tuple[bool, bool]:
    """(one call with this name, and it has exactly these arguments)."""
    found = _CALL.findall(text)
    named = len(found) == 1 and found[0][0] == name
    try:
        return named, named and json.loads(found[0][1]) == arguments
    except ValueError:
        return named, False


def read_questions(data_folder: Path, quick: bool) -> list[dict]:
    """The held-out questions that lie beside the token data."""
    questions = json.loads((data_folder / "tool_questions.json").read_text(encoding="utf-8"))
    return questions[:QUICK_QUESTIONS] if quick else questions
