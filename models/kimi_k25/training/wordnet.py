"""Definitions and word lists from WordNet, the commonest words first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from models.kimi_k25.training.cleaning import capitalised, is_blocked, normalise
from models.kimi_k25.training.documents import Exchange
from models.kimi_k25.training.packages import Packages
from models.kimi_k25.training.synthetic_tools import Vocabulary

_PARTS_OF_SPEECH = {"noun": "a noun", "verb": "a verb", "adj": "an adjective", "adv": "an adverb"}
_TYPE_NUMBERS = {"n": "1", "v": "2", "a": "3", "r": "4", "s": "5"}
_DEFINE = (
    'What does "%s" mean?',
    'Define "%s".',
    'What is the meaning of "%s"?',
    'Explain the word "%s".',
    "What does the word %s mean?",
    "What does the word %s mean?",
    "What does %s mean?",
    "Can you define %s?",
    "Define %s.",
    "Tell me what %s means.",
)
WORDS_DEFINED = 5_000


@dataclass(frozen=True)
class Sense:
    """One meaning of a word; `count` says how often WordNet's tagged texts use it."""

    word: str
    part: str
    gloss: str
    count: int

    def exchange(self, rng: Random) -> Exchange:
        """The answer is always the same, so that a small model can learn it; the question is not."""
        meaning = re.split(r';\s*(?=")', self.gloss)[0].strip().rstrip(";")
        answer = normalise(f"{capitalised(self.word)} ({self.part}): {meaning}.")
        reasoning = f'The user asks what "{self.word}" means. It is {_PARTS_OF_SPEECH[self.part]}.'
        return Exchange(rng.choice(_DEFINE) % self.word, answer, reasoning)


def common_senses(packages: Packages, limit: int = WORDS_DEFINED) -> list[Sense]:
    """The commonest sense of each of the `limit` commonest words: a word has one definition."""
    best: dict[str, Sense] = {}
    for sense in _counted_senses(packages):
        if sense.word not in best or sense.count > best[sense.word].count:
            best[sense.word] = sense
    kept = [s for s in best.values() if len(s.gloss.split(";")[0]) >= 8 and not is_blocked(f"{s.word} {s.gloss}")]
    return sorted(kept, key=lambda s: (-s.count, s.word))[:limit]


def vocabulary(packages: Packages, verbs: int = 1_800, nouns: int = 6_000) -> Vocabulary:
    """Plain lower-case verbs and nouns of 3 to 10 letters."""
    totals: dict[str, dict[str, int]] = {"verb": {}, "noun": {}}
    for sense in _counted_senses(packages):
        if sense.part in totals and re.fullmatch(r"[a-z]{3,10}", sense.word) and not is_blocked(sense.word):
            words = totals[sense.part]
            words[sense.word] = words.get(sense.word, 0) + sense.count
    ranked = {part: sorted(words, key=lambda w: (-words[w], w)) for part, words in totals.items()}
    return Vocabulary(tuple(ranked["verb"][:verbs]), tuple(ranked["noun"][:nouns]))


def _counted_senses(packages: Packages) -> list[Sense]:
    folder = packages.deb("wordnet-base") / "usr/share/wordnet"
    counts = _tag_counts((folder / "cntlist.rev").read_text(encoding="latin1"))
    senses = []
    for part in _PARTS_OF_SPEECH:
        for line in (folder / f"data.{part}").read_text(encoding="latin1").splitlines():
            if line.startswith("  ") or "|" not in line:
                continue
            head, gloss = line.split("|", 1)
            fields = head.split()
            for i in range(int(fields[3], 16)):
                lemma = re.sub(r"\(.*\)", "", fields[4 + 2 * i])
                lexical_id = int(fields[5 + 2 * i], 16)
                key = f"{lemma.lower()}%{_TYPE_NUMBERS[fields[2]]}:{fields[1]}:{lexical_id:02d}"
                if key in counts and re.fullmatch(r"[A-Za-z' -]+", lemma):
                    senses.append(Sense(lemma, part, gloss.strip(), counts[key]))
    return senses


def _tag_counts(text: str) -> dict[str, int]:
    """Sense key without its head word -> number of tagged uses."""
    counts: dict[str, int] = {}
    for line in text.splitlines():
        key, _, count = line.split()
        key = ":".join(key.split(":")[:3])
        counts[key] = counts.get(key, 0) + int(count)
    return counts
