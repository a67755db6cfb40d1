"""Fields outside our models: refused if leaving them out would change the answer, otherwise ignored and reported."""

from __future__ import annotations

import logging
from typing import Any

from engine.server.errors import bad_request
from engine.server.protocol import RequestModel, SamplingFields
from engine.server.structured import unknown_keys

logger = logging.getLogger("turnout.server")

# Values that ask for nothing; anything else in one of these fields asks for something this server does not do.
NOTHING = (None, False, [], {}, "")
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "allowed_token_ids": NOTHING,
    "audio": NOTHING,
    "bad_words": NOTHING,
    "best_of": (None, 1),
    "chat_template": NOTHING,
    "continue_final_message": NOTHING,
    "custom_logit_processor": NOTHING,
    "documents": NOTHING,
    "function_call": (None, "none", "auto"),
    "functions": NOTHING,
    "include_reasoning": (None, True),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": NOTHING,
    "modalities": (None, ["text"]),
    "partial": NOTHING,
    "prompt_embeds": NOTHING,
    "reasoning": NOTHING,
    "separate_reasoning": (None, True),
    "stop_regex": NOTHING,
    "stream_reasoning": (None, True),
    "structural_tag": NOTHING,
    "suffix": NOTHING,
    "thinking_budget": (None,),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": NOTHING,
    "web_search_options": (None,),
}
# Notes to the provider that never bear on an answer.
SILENT = frozenset({"metadata", "prompt_cache_key", "safety_identifier"})
# Wishes that this server grants anyway; others are ignored and reported.
GRANTED: dict[str, tuple[Any, ...]] = {"store": (False,), "service_tier": ("auto", "default")}


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _is_settled(name: str, value: Any) -> bool:
    return value is None or name in UNSUPPORTED or name in SILENT or value in GRANTED.get(name, ())


def check_extra_fields(body: RequestModel, request_id: str) -> list[str]:
    """The warnings about what was ignored. Raises 400 for a field whose wish we cannot fulfil."""
    extra = body.model_extra or {}
    for name, harmless in UNSUPPORTED.items():
        if name in extra and not any(_same(extra[name], value) for value in harmless):
            raise bad_request(f"{name} is not supported yet; leave it out.", name)
    ignored = [name for name, value in extra.items() if not _is_settled(name, value)]
    if isinstance(body, SamplingFields):
        options = body.stream_options
        ignored += [f"stream_options.{name}" for name in (options and options.model_extra) or {}]
        ignored += unknown_keys(body)
    warnings = [f"{name[:80]} has no effect on this server and was ignored." for name in ignored[:32]]
    if warnings:
        logger.warning("request %s: ignored fields %s", request_id, ", ".join(ascii(n[:80]) for n in ignored[:32]))
    return warnings
