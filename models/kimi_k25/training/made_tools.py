"""Conversations with tools: eight everyday ones, and invented ones whose names must be copied from the declaration."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from models.kimi_k25.training.documents import THINKING_SHARE, Document, Exchange, assistant, pick_system, user
from models.kimi_k25.training.everyday_tools import EVERYDAY, Task, everyday_task
from models.kimi_k25.training.synthetic_tools import synthetic_task, synthetic_tool

_CALL_THOUGHTS = (
    "I should call {name}.",
    "The user wants something that {name} can do.",
    "I can use the {name} tool for this.",
    "The tool {name} fits. I will call it.",
)
_RESULT_THOUGHTS = ("The tool has answered.", "I have the result now.", "The result is here. I will tell the user.")


def tool_conversation(rng: Random, talk: Callable[[Random], Exchange]) -> Document:
    """A request, the call, its result and the answer; some stop at the call, some need no tool at all.

    `talk` makes the exchanges in which a tool is declared but not needed.
    """
    tasks = [_task(rng)]
    if rng.random() < 0.2:
        tasks.append(_task(rng))
    tools = {task.name: task.tool for task in tasks}
    for _ in range(rng.randrange(0, 3)):
        extra = rng.choice(list(EVERYDAY.values())) if rng.random() < 0.5 else synthetic_tool(rng).declaration
        tools.setdefault(extra["function"]["name"], extra)
    declared = list(tools.values())
    rng.shuffle(declared)
    thinking = rng.random() < THINKING_SHARE
    system = pick_system(rng, 0.3)
    messages = [{"role": "system", "content": system}] if system else []
    if rng.random() < 0.2:
        small = talk(rng)
        if rng.random() < 0.5:
            messages += [user(small.question), assistant(small.answer, small.reasoning if thinking else None)]
            return Document("tools", messages=messages, tools=declared, thinking=thinking)
        messages += [user(small.question), assistant(small.answer)]
    _add_calls(rng, messages, tasks, thinking)
    return Document("tools", messages=messages, tools=declared, thinking=thinking)


def _task(rng: Random) -> Task:
    return everyday_task(rng) if rng.random() < 0.5 else synthetic_task(rng)


def _add_calls(rng: Random, messages: list[dict], tasks: list[Task], thinking: bool) -> None:
    """Appends the turns of every task; with two tasks half of the time both calls stand in one message."""
    calls_so_far = 0
    if len(tasks) == 2 and rng.random() < 0.5:
        joined = f"{tasks[0].question} Also: {tasks[1].question[0].lower()}{tasks[1].question[1:]}"
        _one_round(rng, messages, joined, tasks, calls_so_far, thinking)
        return
    for task in tasks:
        _one_round(rng, messages, task.question, [task], calls_so_far, thinking)
        calls_so_far += 1


def _one_round(rng: Random, messages: list[dict], question: str, tasks: list[Task], first: int, thinking: bool) -> None:
    names = " and ".join(task.name for task in tasks)
    thought = rng.choice(_CALL_THOUGHTS).format(name=names) if thinking else None
    calls = [_call(task, first + i) for i, task in enumerate(tasks)]
    messages += [user(question), assistant("", thought) | {"tool_calls": calls}]
    for task, call in zip(tasks, calls, strict=True):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(task.result)})
    answer = " ".join(task.answer for task in tasks)
    messages.append(assistant(answer, rng.choice(_RESULT_THOUGHTS) if thinking else None))


def _call(task: Task, number: int) -> dict:
    function = {"name": task.name, "arguments": json.dumps(task.arguments)}
    return {"id": f"functions.{task.name}:{number}", "type": "function", "function": function}
