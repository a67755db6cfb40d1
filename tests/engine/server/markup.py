"""Answers as Kimi writes them, and tools to call."""

from __future__ import annotations

from typing import Any

SB, SE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CB, AB, CE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKERS = (SB, SE, CB, AB, CE, "<think>", "</think>")


def call(header: str, arguments: str = "{}") -> str:
    return f"{CB}{header}{AB}{arguments}{CE}"


def section(*calls: str) -> str:
    return SB + "".join(calls) + SE


def declare(*names: str) -> list[dict[str, Any]]:
    """Tools of these names that take anything."""
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


def called(message: dict[str, Any]) -> list[tuple[str, str, str]] | None:
    """(id, name, arguments) of a message's calls, None without the field."""
    calls = message.get("tool_calls")
    return None if calls is None else [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls]
