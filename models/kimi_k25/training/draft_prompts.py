"""Cuts the corpus into prompts that the target answers itself, for training its draft: prompts.npz.

    python -m models.kimi_k25.training.draft_prompts --corpus .train-corpus --out .draft-data

A conversation is cut before one of its answers and rendered as a server would; of prose some tokens are taken.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np

from models.kimi_k25.training.corpus import read
from models.kimi_k25.training.documents import Document
from models.kimi_k25.training.prepare import load_renderer
from models.kimi_k25.training.rendering import Renderer

MAX_PROMPT = 448
PROSE_PROMPT = (16, 128)
LAST_TURN_SHARE = 0.6
HELD_OUT_SEED = 1_000_003
# Most training prompts of a source; sources without a line get DEFAULT_CAP.
CAPS = {"tools": 22_000, "json": 11_000, "small_talk": 11_000, "copying": 6_000, "sums": 10_000, "chat": 10_000}
DEFAULT_CAP = 6_000
HELD_OUT_CAP = 120
# Cuts of one document: prose is long and little, human talk has many turns.
PROSE_CUTS, CUTS = 8, {"small_talk": 2}


def prompt_of(document: Document, renderer: Renderer, rng: Random) -> list[int]:
    """Token ids up to an answer: the last one for `LAST_TURN_SHARE` of the conversations, else any of them."""
    if document.text is not None:
        begin = rng.randrange(max(len(document.text) - 8 * PROSE_PROMPT[1], 1))
        begin = document.text.find(" ", begin) + 1
        ids = renderer.tokenizer.encode(document.text[begin : begin + 8 * PROSE_PROMPT[1]])
        return ids[: rng.randint(*PROSE_PROMPT)]
    turns = [i for i, message in enumerate(document.messages) if message["role"] == "assistant"]
    turn = turns[-1] if rng.random() < LAST_TURN_SHARE else rng.choice(turns)
    return renderer.template.encode(
        renderer.tokenizer, document.messages[:turn], document.tools, thinking=document.thinking
    )


def cut(
    documents: list[Document], renderer: Renderer, rng: Random, cap: dict[str, int], default: int, seen: set[bytes]
) -> Iterator[tuple[str, np.ndarray]]:
    """(source, ids) of prompts that are not in `seen`, which grows; at most `cap` a source."""
    counts: Counter[str] = Counter()
    cuts = (d for d in documents for _ in range(PROSE_CUTS if d.text is not None else CUTS.get(d.source, 1)))
    for document in cuts:
        if counts[document.source] >= cap.get(document.source, default):
            continue
        ids = np.asarray(prompt_of(document, renderer, rng), np.uint16)
        if not 0 < len(ids) <= MAX_PROMPT or ids.tobytes() in seen:
            continue
        seen.add(ids.tobytes())
        counts[document.source] += 1
        yield document.source, ids


def write(path: Path, prompts: list[tuple[str, np.ndarray]], num_held_out: int) -> None:
    """The arrays that `draft.eagle3.training.prompts` reads; the first `num_held_out` prompts are held out."""
    sources = sorted({source for source, _ in prompts})
    lengths = [len(ids) for _, ids in prompts]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        tokens=np.concatenate([ids for _, ids in prompts]),
        starts=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        source=np.asarray([sources.index(source) for source, _ in prompts], np.uint8),
        held_out=np.arange(len(prompts)) < num_held_out,
        sources=np.asarray(sources),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path(".train-corpus"))
    parser.add_argument("--out", type=Path, default=Path(".draft-data"))
    parser.add_argument("--checkpoint", type=Path, default=Path("models/kimi_k25/tiny"))
    arguments = parser.parse_args()
    renderer, seen = load_renderer(arguments.checkpoint), set()
    kept_out = read(arguments.corpus / "held_out.jsonl")
    held_out = list(cut(kept_out, renderer, Random(HELD_OUT_SEED), {}, HELD_OUT_CAP, seen))
    training = list(cut(read(arguments.corpus / "corpus.jsonl"), renderer, Random(0), CAPS, DEFAULT_CAP, seen))
    path = arguments.out / "prompts.npz"
    write(path, held_out + training, len(held_out))
    for name, prompts in (("held out", held_out), ("training", training)):
        counts = Counter(source for source, _ in prompts)
        tokens = sum(len(ids) for _, ids in prompts)
        print(f"{name}: {len(prompts):,} prompts, {tokens:,} tokens: {dict(sorted(counts.items()))}")
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
