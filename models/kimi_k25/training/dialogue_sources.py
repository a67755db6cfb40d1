"""Dialogues written by people: student small talk (MIT) and hand-written question-answer pairs (BSD)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random

from models.kimi_k25.training.cleaning import ascii_share, is_blocked, is_private, normalise, one_line
from models.kimi_k25.training.documents import Document, Exchange, conversation, pick_system
from models.kimi_k25.training.packages import Packages

STRANGER = "You are a friendly person chatting with a stranger."
_WINDOW = 12
_THOUGHTS = (
    "I am chatting with a stranger. I will answer in a friendly way.",
    "They said something to me. I will reply.",
    "I should keep the conversation going.",
    "Let me answer like a friendly person.",
    "I will say what I think about this.",
)


def small_talk(packages: Packages) -> Iterator[Document]:
    """Human conversations behind their own system prompt, since the second speaker answers as a human."""
    rng = Random(20)
    path = packages.pip("chitchat-dataset==0.9.0") / "chitchat_dataset/dataset.json"
    for talk in json.loads(path.read_text(encoding="utf-8")).values():
        for window in _windows([_utterance(message) for message in talk["messages"]]):
            exchanges = [
                Exchange(window[i], window[i + 1], rng.choice(_THOUGHTS)) for i in range(0, len(window) - 1, 2)
            ]
            yield conversation("small_talk", rng, exchanges, STRANGER)


def _utterance(parts: list[dict]) -> str:
    text = " ".join(part["text"].strip() for part in parts)
    text = normalise(re.sub(r"https?://\S+|\S+@\S+", "", text).replace("\n", " "))
    return re.sub(r"(.)\1{4,}", r"\1\1\1", text)


def _windows(turns: list[str]) -> Iterator[list[str]]:
    """Runs of acceptable turns, an even number of them, from 4 to `_WINDOW`."""
    window: list[str] = []
    for turn in [*turns, ""]:
        clean = 1 < len(turn) < 600 and ascii_share(turn) > 0.97 and not is_blocked(turn) and not is_private(turn)
        if clean:
            window.append(turn)
        if not clean or len(window) == _WINDOW:
            window = window[: len(window) // 2 * 2]
            if len(window) >= 4:
                yield window
            window = []


_PERSONAL = re.compile(r"\b(robot|bot|computer|chatterbot|program|software|machine|AI|siri|alexa)\b", re.IGNORECASE)


def written_pairs(packages: Packages) -> Iterator[Document]:
    """chatterbot-corpus, without the pairs in which the bot speaks of its own body, memory or maker."""
    rng = Random(21)
    folder = packages.pip("chatterbot-corpus==1.3.3") / "chatterbot_corpus/data/english"
    for path in sorted(folder.glob("*.yml")):
        text = path.read_text(encoding="utf-8").split("conversations:", 1)[-1]
        for block in re.split(r"(?m)^- ", text)[1:]:
            turns = [_yaml_item(item) for item in re.split(r"(?m)^(?:  )?- ", block)[1:]]
            turns = turns[: len(turns) // 2 * 2]
            if not turns or any(is_blocked(t) or _PERSONAL.search(t) or not t for t in turns):
                continue
            thought = f"The user says: {one_line(turns[-2])[:60]} I will answer that."
            exchanges = [Exchange(turns[i], turns[i + 1], thought) for i in range(0, len(turns), 2)]
            yield conversation("written_pairs", rng, exchanges, pick_system(rng))


def _yaml_item(item: str) -> str:
    if item.startswith("|"):
        return normalise(re.sub(r"(?m)^    ", "", item.split("\n", 1)[1]).rstrip())
    item = one_line(item)
    if item[:1] == item[-1:] and item[:1] in ("'", '"'):
        item = item[1:-1].replace("''", "'").replace('\\"', '"')
    return normalise(item)
