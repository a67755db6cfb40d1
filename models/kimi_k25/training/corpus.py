"""Collects every document of the corpus and writes training and held-out ones, one JSON document a line.

python -m models.kimi_k25.training.corpus --work WORK --out .train-corpus
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from models.kimi_k25.training import dialogue_sources, fact_sources, prose_sources, wordnet
from models.kimi_k25.training.documents import Document, Exchange, conversation, pick_system
from models.kimi_k25.training.made_chat import counting_question, memory_chat, persona_chat, small_exchange
from models.kimi_k25.training.made_copying import copying_document
from models.kimi_k25.training.made_json import json_task
from models.kimi_k25.training.made_sums import any_sum
from models.kimi_k25.training.made_text import story, story_parts, word_task
from models.kimi_k25.training.made_tools import tool_conversation, tool_questions
from models.kimi_k25.training.packages import Packages

# Size caps in characters of message text: a little prose for fluency, much of what users type.
PROSE_CAPS = {
    "novels": 2_000_000,
    "web_bible": 800_000,
    "python_manual": 1_200_000,
    "postgres_manual": 400_000,
    "jargon_file": 600_000,
    "country_prose": 700_000,
}
DIALOGUE_CAPS = {"small_talk": 6_000_000, "written_pairs": 1_000_000}
# Numbers of made-up conversations; the held-out ones come from another seed.
MADE_COUNTS = {
    "definitions": 28_000,
    "countries": 12_000,
    "capitals": 9_000,
    "chat": 26_000,
    "sums": 50_000,
    "words": 14_000,
    "stories": 10_000,
    "json": 22_000,
    "tools": 68_000,
    "copying": 26_000,
    "mixed": 18_000,
}
HELD_OUT_SEED = 1_000_003
TOOL_QUESTIONS = 200


class Makers:
    """The generators of exchanges by source name; WordNet and the factbook are read once."""

    def __init__(self, packages: Packages):
        self._senses = wordnet.common_senses(packages)
        self.vocabulary = wordnet.vocabulary(packages)
        self._facts = list(fact_sources.country_facts(packages))
        self._capitals = fact_sources.capitals(packages)
        self.exchanges: dict[str, Callable[[Random], Exchange]] = {
            "definitions": lambda rng: rng.choice(self._senses).exchange(rng),
            "countries": lambda rng: rng.choice(self._facts),
            "capitals": lambda rng: fact_sources.capital_exchange(rng, self._capitals),
            "chat": small_exchange,
            "sums": any_sum,
            "words": lambda rng: counting_question(rng) if rng.random() < 0.05 else word_task(rng),
            "stories": story,
            "json": json_task,
        }

    def any_exchange(self, rng: Random) -> Exchange:
        names = ("chat", "chat", "chat", "sums", "sums", "capitals", "words", "json", "definitions", "stories")
        return self.exchanges[rng.choice(names)](rng)

    def document(self, source: str, rng: Random) -> Document:
        if source == "tools":
            return tool_conversation(rng, self.any_exchange, self.vocabulary)
        if source == "copying":
            return copying_document(rng, self.vocabulary)
        if source == "mixed":
            exchanges = [self.any_exchange(rng) for _ in range(rng.randrange(2, 6))]
            return conversation(source, rng, exchanges, pick_system(rng))
        if source == "chat" and (draw := rng.random()) < 0.35:
            return memory_chat(rng) if draw < 0.25 else persona_chat(rng)
        if source == "stories" and rng.random() < 0.2:
            return Document(source, text=story_parts(rng)[1])
        count = rng.choice((1, 1, 1, 2, 3)) if source != "stories" else 1
        return conversation(source, rng, [self.exchanges[source](rng) for _ in range(count)], pick_system(rng))


def made_documents(makers: Makers, source: str, count: int, seed: int) -> Iterator[Document]:
    """`count` documents, fewer where a small space of templates runs dry (repeats are kept one time in four)."""
    rng, seen = Random(f"{seed} {source}"), set()
    for _ in range(count):
        document = makers.document(source, rng)
        key = hash(document.to_json())
        if key in seen and rng.random() < 0.75:
            continue
        seen.add(key)
        yield document


def _size(document: Document) -> int:
    return len(document.text) if document.text else sum(len(m["content"]) for m in document.messages)


def _capped(documents: Iterable[Document], cap: int) -> Iterator[Document]:
    """A fixed random selection of unique documents up to `cap` characters."""
    unique = list({d.to_json(): d for d in documents}.values())
    Random(1).shuffle(unique)
    total = 0
    for document in unique:
        total += _size(document)
        if total > cap:
            return
        yield document


def collected_documents(packages: Packages) -> Iterator[Document]:
    """Prose and human dialogues, each source up to its cap."""
    for source, cap in PROSE_CAPS.items():
        read = fact_sources.country_prose if source == "country_prose" else getattr(prose_sources, source)
        yield from _capped((Document(source, text=text) for text in read(packages)), cap)
    for source, cap in DIALOGUE_CAPS.items():
        yield from _capped(getattr(dialogue_sources, source)(packages), cap)


def build(packages: Packages, scale: float = 1.0) -> tuple[list[Document], list[Document], list[dict]]:
    """(training documents, held-out ones, questions about tools that neither names), in a fixed random order."""
    training: list[Document] = []
    held_out: list[Document] = []
    for document in collected_documents(packages):
        (held_out if document.is_held_out() else training).append(document)
    makers = Makers(packages)
    for source, count in MADE_COUNTS.items():
        make = partial(made_documents, makers, source)
        training += make(int(count * scale), seed=0)
        held_out += make(max(60, count // 300), seed=HELD_OUT_SEED)
    Random(0).shuffle(training)
    seen = {tool["function"]["name"] for document in training + held_out for tool in document.tools or ()}
    return training, held_out, tool_questions(TOOL_QUESTIONS, HELD_OUT_SEED, makers.vocabulary, seen)


def write(path: Path, documents: list[Document]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(document.to_json() + "\n" for document in documents)


def read(path: Path) -> list[Document]:
    with path.open(encoding="utf-8") as file:
        return [Document.from_json(line) for line in file]


def summary(documents: list[Document]) -> dict[str, dict[str, float]]:
    counts, sizes = Counter(), Counter()
    for document in documents:
        counts[document.source] += 1
        sizes[document.source] += _size(document)
    return {s: {"documents": counts[s], "megabytes": round(sizes[s] / 1e6, 2)} for s in sorted(counts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("corpus_work"), help="folder of unpacked packages")
    parser.add_argument("--out", type=Path, default=Path(".train-corpus"))
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of made-up documents")
    arguments = parser.parse_args()
    training, held_out, questions = build(Packages(arguments.work), arguments.scale)
    write(arguments.out / "corpus.jsonl", training)
    write(arguments.out / "held_out.jsonl", held_out)
    (arguments.out / "tool_questions.json").write_text(json.dumps(questions, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"training": summary(training), "held_out": summary(held_out)}, indent=1))


if __name__ == "__main__":
    main()
