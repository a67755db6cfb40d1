"""Conversations with tools: everyday ones, and invented ones whose names must be copied from the declaration."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from models.kimi_k25.training.documents import THINKING_SHARE, Document, Exchange, assistant, pick_system, user
from models.kimi_k25.training.everyday_tools import EVERYDAY, Task, everyday_task
from models.kimi_k25.training.synthetic_tools import PLAIN, Vocabulary, synthetic_task, synthetic_tool

EVERYDAY_SHARE = 0.25

# Naming the arguments before the call splits the copy into two easier steps.
_CALL_THOUGHT = "The tool {name} fits. Its arguments are {keys}."
_RESULT_THOUGHTS = ("The tool has answered.", "I have the result now.", "The result is here. I will tell the user.")


def tool_conversation(rng: Random, talk: Callable[[Random], Exchange], vocabulary: Vocabulary = PLAIN) -> Document:
    """A request, the call, its result and the answer; some need no tool at all.

    `talk` makes the exchanges in which a tool is declared but not needed.
    """
    tasks, tools = _tasks_and_tools(rng, vocabulary)
    declared = list(tools.values())
    rng.shuffle(declared)
    thinking = rng.random() < THINKING_SHARE
    system = pick_system(rng, 0.2)
    messages = [{"role": "system", "content": system}] if system else []
    if rng.random() < 0.12:
        small = talk(rng)
        if rng.random() < 0.5:
            messages += [user(small.question), assistant(small.answer, small.reasoning if thinking else None)]
            return Document("tools", messages=messages, tools=declared, thinking=thinking)
        messages += [user(small.question), assistant(small.answer)]
    _add_calls(rng, messages, tasks, thinking)
    return Document("tools", messages=messages, tools=declared, thinking=thinking)


def _tasks_and_tools(rng: Random, vocabulary: Vocabulary) -> tuple[list[Task], dict[str, dict]]:
    """One or two tasks, and 1 to 4 tools by name: theirs, and some that are easily taken for them."""
    tasks, tools = [], {}
    for _ in range(2 if rng.random() < 0.15 else 1):
        like = None
        if rng.random() < EVERYDAY_SHARE:
            task = everyday_task(rng)
        else:
            task, like = synthetic_task(rng, vocabulary)
        tasks.append(task)
        tools[task.name] = task.tool
    for _ in range(rng.choice((0, 1, 1, 2))):
        if rng.random() < 0.3:
            extra = rng.choice(list(EVERYDAY.values()))
        else:
            extra = synthetic_tool(rng, vocabulary, like if rng.random() < 0.5 else None).declaration
        tools.setdefault(extra["function"]["name"], extra)
    return [task for task in tasks if tools[task.name] is task.tool], tools


def tool_questions(count: int, seed: int, vocabulary: Vocabulary, seen: set[str]) -> list[dict]:
    """Requests for one invented tool whose name is not in `seen`: {"question", "tools", "name", "arguments"}."""
    rng, questions = Random(f"{seed} tool questions"), []
    while len(questions) < count:
        task, tool = synthetic_task(rng, vocabulary)
        others = [synthetic_tool(rng, vocabulary, rng.choice((tool, None))) for _ in range(rng.choice((0, 1, 2)))]
        names = {other.name for other in others} | {task.name}
        if names & seen or len(names) <= len(others):
            continue
        tools = [task.tool, *(other.declaration for other in others)]
        rng.shuffle(tools)
        questions.append({"question": task.question, "tools": tools, "name": task.name, "arguments": task.arguments})
    return questions


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
    thought = " ".join(_call_thought(task) for task in tasks) if thinking else None
    calls = [_call(task, first + i) for i, task in enumerate(tasks)]
    messages += [user(question), assistant("", thought) | {"tool_calls": calls}]
    for task, call in zip(tasks, calls, strict=True):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(task.result)})
    answer = " ".join(task.answer for task in tasks)
    messages.append(assistant(answer, rng.choice(_RESULT_THOUGHTS) if thinking else None))


def _call_thought(task: Task) -> str:
    return _CALL_THOUGHT.format(name=task.name, keys=", ".join(task.arguments))


def _call(task: Task, number: int) -> dict:
    function = {"name": task.name, "arguments": json.dumps(task.arguments)}
    return {"id": f"functions.{task.name}:{number}", "type": "function", "function": function}
