"""Trains the byte-level BPE on the corpus and writes the tokenizer files of the checkpoint.

    python -m models.kimi_k25.training.tokenizer_training --corpus .train-corpus --out models/kimi_k25/tiny

Kimi's split pattern; control tokens are cut out before training. Digits get no merges, so that every digit of a number
is one token and sums are a walk over digits.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from engine.chat_template import ChatTemplate
from engine.tokenizer import SPLIT_PATTERN, Tokenizer, write_ranks
from models.kimi_k25.tool_declaration import declare_tools
from models.kimi_k25.training.architecture import NUM_RANKS, Architecture
from models.kimi_k25.training.corpus import read
from models.kimi_k25.training.documents import Document

_CONTROL = re.compile(r"<\|[a-z_]+\|>|</?think>")


def train_ranks(texts: Iterable[str], num_ranks: int = NUM_RANKS) -> list[bytes]:
    """The bytes of each rank: 256 single bytes, then merges in the order in which they were found."""
    from tokenizers import Regex, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    fast = FastTokenizer(BPE())
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=num_ranks, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    fast.train_from_iterator(texts, trainer)
    to_byte = _byte_values()
    vocabulary = sorted(fast.get_vocab().items(), key=lambda item: item[1])
    ranks = [bytes(to_byte[c] for c in token) for token, _ in vocabulary]
    if len(ranks) != num_ranks:
        raise ValueError(f"The corpus gave {len(ranks)} ranks instead of {num_ranks}; it is too small.")
    return ranks


def _byte_values() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary -> the byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def plain_pieces(texts: Iterable[str]) -> Iterator[str]:
    """The texts between control tokens."""
    for text in texts:
        yield from (piece for piece in _CONTROL.split(text) if piece)


def rendered_texts(documents: list[Document], template: ChatTemplate) -> Iterator[str]:
    for document in documents:
        if document.text is not None:
            yield document.text
        else:
            yield template.render(document.messages, document.tools, add_generation_prompt=False)


def check_against_tokenizers(ranks: list[bytes], tokenizer: Tokenizer, texts: list[str]) -> None:
    """Raises ValueError unless a fast BPE with Kimi's pattern and tiktoken give the same ids, which decode back."""
    from tokenizers import Regex, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import BPE

    to_text = {b: c for c, b in _byte_values().items()}
    names = ["".join(to_text[b] for b in rank) for rank in ranks]
    known = {rank: i for i, rank in enumerate(ranks)}
    merges = [_last_merge(rank, known, to_text) for rank in ranks[256:]]
    fast = FastTokenizer(BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in texts:
        ids = tokenizer.encode(text)
        if fast.encode(text).ids != ids or tokenizer.decode(ids) != text:
            raise ValueError(f"The tokenizers disagree on {text[:60]!r}.")


def _last_merge(token: bytes, known: dict[bytes, int], to_text: dict[int, str]) -> tuple[str, str]:
    """The two parts that remain when `token` is built from lower ranks only."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        pairs = [known.get(parts[i] + parts[i + 1], len(known)) for i in range(len(parts) - 1)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return tuple("".join(to_text[b] for b in part) for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path(".train-corpus"))
    parser.add_argument("--out", type=Path, default=Path("models/kimi_k25/tiny"))
    parser.add_argument("--share", type=float, default=0.3, help="share of the documents to train on")
    arguments = parser.parse_args()
    template = ChatTemplate.from_directory(arguments.out, declare_tools)
    if template is None:
        raise SystemExit(f"{arguments.out} has no chat_template.jinja; put the checkpoint's template there first.")
    rng = Random(5)
    documents = [d for d in read(arguments.corpus / "corpus.jsonl") if rng.random() < arguments.share]
    ranks = train_ranks(plain_pieces(rendered_texts(documents, template)))
    Architecture().write(arguments.out)
    write_ranks(arguments.out / "tiktoken.model", ranks)
    tokenizer = Tokenizer.from_directory(arguments.out)
    sample = list(plain_pieces(rendered_texts(documents[:600], template)))
    check_against_tokenizers(ranks, tokenizer, sample)
    length = sum(len(piece.encode()) for piece in sample)
    tokens = sum(len(tokenizer.encode(piece)) for piece in sample)
    print(f"{len(ranks)} ranks, {length / tokens:.2f} bytes a token, 600 documents agree with tiktoken")


if __name__ == "__main__":
    main()
