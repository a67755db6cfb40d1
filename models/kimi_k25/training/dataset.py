"""Token data on disk and in packed rows: whole documents side by side, attention and loss within each."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PADDING = -1


@dataclass
class TokenData:
    """Documents one after the other: tokens uint16 [T], answer bool [T] (written by the model: what a server would
    generate), starts int64 [D + 1], source uint8 [D] as an index into `sources`."""

    tokens: np.ndarray
    answer: np.ndarray
    starts: np.ndarray
    source: np.ndarray
    sources: list[str]

    def save(self, path: Path) -> None:
        header = {"sources": self.sources, "tokens": len(self.tokens), "documents": len(self.source)}
        lengths = np.diff(self.starts).astype("<u2")
        parts = (self.tokens.astype("<u2"), np.packbits(self.answer), lengths, self.source.astype("u1"))
        with lzma.open(path, "wb", preset=4) as file:
            file.write(json.dumps(header).encode() + b"\n")
            for part in parts:
                file.write(part.tobytes())

    @classmethod
    def load(cls, path: Path) -> TokenData:
        with lzma.open(path, "rb") as file:
            header = json.loads(file.readline())
            body = file.read()
        count, documents, at = header["tokens"], header["documents"], 0
        arrays = []
        for dtype, size in (("<u2", count), ("u1", (count + 7) // 8), ("<u2", documents), ("u1", documents)):
            array = np.frombuffer(body, dtype, size, at)
            at += array.nbytes
            arrays.append(array)
        tokens, bits, lengths, source = arrays
        starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        return cls(tokens, np.unpackbits(bits, count=count).astype(bool), starts, source, header["sources"])

    def chat_documents(self) -> np.ndarray:
        """Indices of the documents that have an answer."""
        return np.flatnonzero(np.add.reduceat(self.answer, self.starts[:-1]) > 0)


@dataclass
class Rows:
    """Packed rows, all [R, length]: token ids, document numbers (PADDING for none), whether a token is an answer."""

    tokens: np.ndarray
    documents: np.ndarray
    answer: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def batches(self, size: int) -> Iterator[Rows]:
        """Full batches in order; a rest is left out."""
        for i in range(0, len(self) - size + 1, size):
            yield Rows(self.tokens[i : i + size], self.documents[i : i + size], self.answer[i : i + size])


def assign_rows(lengths: np.ndarray, row_length: int, open_rows: int = 12) -> list[list[int]]:
    """First fit over a few open rows: position in `lengths` -> rows of at most `row_length` tokens in all."""
    rows: list[list[int]] = []
    free: list[int] = []
    pool: list[list[int]] = []
    for i, length in enumerate(lengths.tolist()):
        for j, space in enumerate(free):
            if length <= space:
                pool[j].append(i)
                free[j] -= length
                break
        else:
            if len(pool) == open_rows:
                fullest = free.index(min(free))
                rows.append(pool.pop(fullest))
                free.pop(fullest)
            pool.append([i])
            free.append(row_length - length)
    return rows + pool


def pack(data: TokenData, chosen: np.ndarray, row_length: int, pad_id: int) -> Rows:
    """Rows that hold the `chosen` documents whole; raises ValueError for one longer than a row."""
    lengths = (data.starts[1:] - data.starts[:-1])[chosen]
    if len(lengths) and lengths.max() > row_length:
        raise ValueError(f"A document of {lengths.max()} tokens does not fit a row of {row_length}.")
    assigned = assign_rows(lengths, row_length)
    tokens = np.full((len(assigned), row_length), pad_id, np.int32)
    documents = np.full((len(assigned), row_length), PADDING, np.int32)
    answer = np.zeros((len(assigned), row_length), bool)
    order = np.concatenate([np.asarray(row) for row in assigned])
    row_of = np.repeat(np.arange(len(assigned)), [len(row) for row in assigned])
    ends = np.cumsum(lengths[order])
    before_row = np.concatenate(([0], ends[np.cumsum([len(row) for row in assigned]) - 1]))[:-1]
    target = np.arange(ends[-1]) - np.repeat(before_row[row_of] - row_of * row_length, lengths[order])
    begin = data.starts[chosen[order]]
    source = np.arange(ends[-1]) + np.repeat(begin - (ends - lengths[order]), lengths[order])
    tokens.ravel()[target] = data.tokens[source]
    answer.ravel()[target] = data.answer[source]
    documents.ravel()[target] = np.repeat(chosen[order], lengths[order])
    return Rows(tokens, documents, answer)


class BatchStream:
    """Endless batches over shuffled epochs; the next epoch is packed in the background."""

    def __init__(self, data: TokenData, chosen: np.ndarray, row_length: int, rows: int, pad_id: int, seed: int):
        self._arguments = (data, chosen, row_length, pad_id)
        self._rows, self._seed, self.epoch = rows, seed, 0
        self._pool = ThreadPoolExecutor(1)
        self._next = self._pool.submit(self._epoch, 0)

    def _epoch(self, number: int) -> Rows:
        data, chosen, row_length, pad_id = self._arguments
        generator = np.random.default_rng((self._seed, number))
        packed = pack(data, generator.permutation(chosen), row_length, pad_id)
        order = generator.permutation(len(packed))
        return Rows(packed.tokens[order], packed.documents[order], packed.answer[order])

    def __iter__(self) -> Iterator[Rows]:
        while True:
            packed = self._next.result()
            self.epoch += 1
            self._next = self._pool.submit(self._epoch, self.epoch)
            yield from packed.batches(self._rows)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
