"""Log-probabilities in the two forms of OpenAI's API: of chat, and the older one of text completions.

Every generated id has an entry, the end token and reasoning included, so there are as many as `completion_tokens`.
"""

from __future__ import annotations

from typing import Any

from engine.request import Logprob

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


def _value(entry: Logprob) -> float:
    return max(entry.logprob, MIN_LOGPROB)


def _ranked(position: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    return sorted(position.items(), key=lambda item: item[1].rank)[:count]


def _token(tokenizer: Any, token_id: int, entry: Logprob) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", errors="replace"), "logprob": _value(entry), "bytes": list(raw)}


def chat_logprobs(
    tokenizer: Any, token_ids: list[int], logprobs: list[dict[int, Logprob]], num_top: int
) -> list[dict[str, Any]]:
    """One entry a token, each with exactly `num_top` alternatives, most likely first."""
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        top = [_token(tokenizer, other, entry) for other, entry in _ranked(position, num_top)]
        content.append(_token(tokenizer, token_id, position[token_id]) | {"top_logprobs": top})
    return content


def _old_name(tokenizer: Any, token_id: int) -> str:
    """The token's text; for half a character its bytes, so that different tokens keep different names."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TextOffsets:
    """Where each token begins in the text, in characters; half a character begins where the whole one does."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._begun = 0

    def push(self, token_id: int, hidden: bool) -> int:
        """The offset of the next token; a `hidden` one is not in the text."""
        raw = b"" if hidden else self._tokenizer.token_bytes(token_id)
        continues = raw[:1] != b"" and raw[0] & 0xC0 == 0x80 and self._begun > 0
        offset = self._begun - continues
        self._begun += sum(byte & 0xC0 != 0x80 for byte in raw)
        return offset


def completion_logprobs(
    tokenizer: Any,
    token_ids: list[int],
    logprobs: list[dict[int, Logprob] | None],
    num_top: int,
    text_offsets: list[int],
) -> dict[str, list]:
    """The older form. The alternatives include the token itself, so there may be `num_top` + 1 of them; the first
    token of a prompt has none."""
    result: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": text_offsets}
    for token_id, position in zip(token_ids, logprobs, strict=True):
        result["tokens"].append(_old_name(tokenizer, token_id))
        if position is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        result["token_logprobs"].append(_value(position[token_id]))
        listed = dict(_ranked(position, num_top)) | {token_id: position[token_id]}
        result["top_logprobs"].append({_old_name(tokenizer, t): _value(entry) for t, entry in listed.items()})
    return result


def prompt_logprobs_json(tokenizer: Any, logprobs: list[dict[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """vLLM's form: per prompt token an object of token id -> logprob, rank, decoded_token; the first is null."""

    def entry(token_id: int, value: Logprob) -> dict[str, Any]:
        return {"logprob": _value(value), "rank": value.rank, "decoded_token": _old_name(tokenizer, token_id)}

    return [None if p is None else {str(t): entry(t, value) for t, value in p.items()} for p in logprobs]
