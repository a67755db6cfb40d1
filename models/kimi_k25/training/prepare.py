"""Renders and tokenises the corpus into what training reads: train.tokens.xz, held_out.tokens.xz, tool_questions.json.

python -m models.kimi_k25.training.prepare --corpus .train-corpus --data .train-data --checkpoint models/kimi_k25/tiny
"""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from pathlib import Path

import numpy as np

from engine.chat_template import ChatTemplate
from engine.tokenizer import Tokenizer
from models.kimi_k25.tool_declaration import declare_tools
from models.kimi_k25.training.corpus import read
from models.kimi_k25.training.dataset import TokenData
from models.kimi_k25.training.documents import Document
from models.kimi_k25.training.rendering import Renderer

ROW_LENGTH = 1024


def load_renderer(checkpoint: Path) -> Renderer:
    """The chat template and tokenizer that lie in the checkpoint's folder."""
    return Renderer(ChatTemplate.from_directory(checkpoint, declare_tools), Tokenizer.from_directory(checkpoint))


def tokenize(documents: list[Document], renderer: Renderer, row_length: int = ROW_LENGTH) -> TokenData:
    """Prose longer than a row is cut; a conversation longer than a row is left out."""
    sources = sorted({document.source for document in documents})
    tokens, answers, lengths, source_of = [], [], [], []
    for document in documents:
        ids, answer = renderer.encode(document)
        if len(ids) > row_length and document.text is None:
            continue
        for start in range(0, len(ids), row_length):
            part = ids[start : start + row_length]
            tokens.append(np.asarray(part, np.uint16))
            answers.append(np.asarray(answer[start : start + row_length], bool))
            lengths.append(len(part))
            source_of.append(sources.index(document.source))
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return TokenData(np.concatenate(tokens), np.concatenate(answers), starts, np.asarray(source_of, np.uint8), sources)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path(".train-corpus"))
    parser.add_argument("--data", type=Path, default=Path(".train-data"))
    parser.add_argument("--checkpoint", type=Path, default=Path("models/kimi_k25/tiny"))
    arguments = parser.parse_args()
    arguments.data.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(arguments.corpus / "tool_questions.json", arguments.data / "tool_questions.json")
    renderer = load_renderer(arguments.checkpoint)
    for name, corpus in (("held_out", "held_out"), ("train", "corpus")):
        data = tokenize(read(arguments.corpus / f"{corpus}.jsonl"), renderer)
        path = arguments.data / f"{name}.tokens.xz"
        data.save(path)
        counts = Counter()
        for i, source in enumerate(data.source):
            counts[data.sources[source]] += int(data.starts[i + 1] - data.starts[i])
        share = data.answer.mean()
        print(f"{path}: {len(data.tokens):,} tokens, {path.stat().st_size / 2**20:.1f} MiB, {share:.0%} answers")
        print("  " + ", ".join(f"{s} {n:,}" for s, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
