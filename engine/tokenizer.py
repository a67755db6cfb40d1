"""Text to token ids and back, from a checkpoint's `tiktoken.model` and `tokenizer_config.json`.

Knows Kimi's split pattern and where its control tokens lie. Runs no code from the checkpoint and knows no templates.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from engine.config import ConfigError
from engine.errors import InvalidRequestError
from engine.json_files import read_json, read_text

NUM_SPECIAL_TOKENS = 256
# Ids of Kimi's named control tokens, counted from the first id after the ranks.
KIMI_SPECIAL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<think>": 22,
    "</think>": 23,
    "[UNK]": 254,
    "[PAD]": 255,
}
# Markup of the answer itself: skip_special_tokens leaves these in the text, the output parser needs them.
VISIBLE_MARKERS = frozenset(
    name for name, offset in KIMI_SPECIAL_OFFSETS.items() if 11 <= offset <= 15 or offset in (22, 23)
)
REQUIRED_MARKERS = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")

_NOT_HAN = r"&&[^\p{Han}]]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}" + _NOT_HAN
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}" + _NOT_HAN
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# Kimi's own loader cuts here, so these borders are part of the tokenisation; they also keep its cost linear.
MAX_CHUNK_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_RUNS = re.compile(r"\s+|\S+")


class Tokenizer:
    """Byte-level BPE with `vocab_size` = ranks + 256 ids, the last 256 of them control tokens.

    `special_tokens` maps the text of each control token to its id. The attributes ending in `_id` are the ids that a
    server needs; those of markers that a checkpoint does not have are None. `max_token_bytes` are those of the longest
    token: a text of more than k times as many UTF-8 bytes has more than k tokens.
    """

    def __init__(
        self,
        ranks: Sequence[bytes],
        special_tokens: dict[str, int],
        hidden_ids: Iterable[int],
        bos: str = "[BOS]",
        eos: str = "[EOS]",
    ):
        """`ranks[i]` are the bytes of token i; `hidden_ids` are those that skip_special_tokens leaves out."""
        self.vocab_size = len(ranks) + NUM_SPECIAL_TOKENS
        self.special_tokens = dict(special_tokens)
        self._hidden = frozenset(hidden_ids)
        names = sorted(special_tokens, key=special_tokens.get)
        self._bytes = [*ranks, *(name.encode() for name in names)]
        self.max_token_bytes = max(map(len, self._bytes))
        self._special_pattern = re.compile(_alternation(names))
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=SPLIT_PATTERN, mergeable_ranks={b: i for i, b in enumerate(ranks)}, special_tokens={}
        )
        find = self.special_tokens.get
        self.bos_id, self.eos_id = self.special_tokens[bos], self.special_tokens[eos]
        self.im_end_id, self.eot_id, self.pad_id = find("<|im_end|>"), find("[EOT]"), find("[PAD]")
        self.think_begin_id, self.think_end_id = find("<think>"), find("</think>")
        self.tool_section_begin_id = find("<|tool_calls_section_begin|>")
        self.tool_section_end_id = find("<|tool_calls_section_end|>")
        self.tool_call_begin_id, self.tool_call_end_id = find("<|tool_call_begin|>"), find("<|tool_call_end|>")
        self.tool_argument_begin_id = find("<|tool_call_argument_begin|>")

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Loads and checks the tokenizer of a checkpoint directory; raises ConfigError naming the file at fault."""
        folder = Path(path)
        ranks = read_ranks(folder / "tiktoken.model")
        config_file = folder / "tokenizer_config.json"
        config = read_json(config_file) if config_file.exists() else {}
        special_tokens, hidden = _special_tokens(config, len(ranks), config_file)
        bos, eos = (_token_name(config, key, special_tokens, config_file) for key in ("bos_token", "eos_token"))
        tokenizer = cls(ranks, special_tokens, hidden, bos, eos)
        tokenizer.check()
        _check_fast_tokenizer(folder / "tokenizer.json", special_tokens)
        return tokenizer

    @classmethod
    def synthetic(cls, vocab_size: int) -> Tokenizer:
        """A working tokenizer of any size of at least 512, the same every time: all bytes, then short lower-case words.

        Its control tokens are Kimi's, at the last 256 ids. Raises ConfigError for a vocabulary that is too small."""
        ranks = synthetic_ranks(vocab_size)
        special_tokens, hidden = _special_tokens({}, len(ranks), Path("tokenizer_config.json"))
        tokenizer = cls(ranks, special_tokens, hidden)
        tokenizer.check()
        return tokenizer

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of `text`, without BOS or EOS; control tokens are recognised only with `allow_special`.

        Raises InvalidRequestError for text that no UTF-8 can carry (lone surrogates).
        """
        spans = self.find_special(text) if allow_special else []
        return self.encode_with_spans(text, spans)

    def find_special(self, text: str, start: int = 0, stop: int | None = None) -> list[tuple[int, int, int]]:
        """(start, stop, id) of each control token spelled within text[start:stop]."""
        matches = self._special_pattern.finditer(text, start, len(text) if stop is None else stop)
        return [(m.start(), m.end(), self.special_tokens[m.group()]) for m in matches]

    def encode_with_spans(self, text: str, spans: Sequence[tuple[int, int, int]]) -> list[int]:
        """Encodes `text` with exactly the control tokens of `spans` (ascending, disjoint), all else as plain text."""
        check_encodable(text)
        cuts = _cut_positions(text)
        ids: list[int] = []
        position = 0
        for start, stop, token_id in spans:
            self._encode_plain(text, position, start, cuts, ids)
            ids.append(token_id)
            position = stop
        self._encode_plain(text, position, len(text), cuts, ids)
        return ids

    def _encode_plain(self, text: str, start: int, stop: int, cuts: list[int], ids: list[int]) -> None:
        if start == stop:
            return
        inside = cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)]
        for left, right in zip([start, *inside], [*inside, stop], strict=True):
            ids.extend(self._encoding.encode_ordinary(text[left:right]))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are no UTF-8, an incomplete last character included, become U+FFFD each in the
        way of Python's "replace"; IncrementalDecoder gives the same text."""
        return self._join(ids, skip_special_tokens).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, control tokens as their text; raises InvalidRequestError outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(f"Token id {token_id} is not in the vocabulary of {self.vocab_size} entries.")
        return self._bytes[token_id]

    def is_hidden(self, token_id: int) -> bool:
        """Whether skip_special_tokens leaves this token out of the text."""
        return token_id in self._hidden

    def _join(self, ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        hidden = self._hidden if skip_special_tokens else ()
        return b"".join(self.token_bytes(i) for i in ids if i not in hidden)

    def check(self) -> None:
        """Start-up self-check: each control token is one id both ways, and plain text survives a round trip."""
        for name, token_id in self.special_tokens.items():
            ids = self.encode(name, allow_special=True)
            if ids != [token_id] or self.decode(ids, skip_special_tokens=False) != name:
                raise ConfigError(
                    f"Control token {name} should be id {token_id} but encodes to {ids}; fix the tokenizer."
                )
        sample = "Hello, it's 12345 汉字 and\n\té😀!"
        if self.decode(self.encode(sample)) != sample:
            raise ConfigError("The tokenizer does not give plain text back after encoding it; its ranks are damaged.")


class IncrementalDecoder:
    """Text of a growing list of ids: the pieces, joined, equal `Tokenizer.decode` of all of them.

    A character is held back until its last byte has come. `finish` turns an incomplete one into a single U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(self._tokenizer._join(token_ids, self._skip))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def synthetic_ranks(vocab_size: int) -> list[bytes]:
    """The ordinary tokens of `Tokenizer.synthetic`: all but the last 256 ids. Raises ConfigError as it does."""
    num_ranks = vocab_size - NUM_SPECIAL_TOKENS
    if num_ranks < 256:
        raise ConfigError(f"a vocabulary of {vocab_size} holds no 256 bytes and 256 control tokens; use 512 or more.")
    return [bytes([i]) for i in range(256)] + _words(num_ranks - 256)


def _words(count: int) -> list[bytes]:
    """Lower-case words by length, then alphabet; every beginning of one comes before it, so that merging finds it."""
    lengths = itertools.count(2)
    words = (word for n in lengths for word in itertools.product(b"abcdefghijklmnopqrstuvwxyz", repeat=n))
    return [bytes(word) for word in itertools.islice(words, count)]


def check_encodable(text: str) -> None:
    """Raises InvalidRequestError if `text` holds a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidRequestError(
            f"The text holds a lone surrogate (U+{code:04X}) at character {error.start}; send valid Unicode."
        ) from None


def write_ranks(path: str | Path, ranks: Iterable[bytes]) -> None:
    """Writes a `tiktoken.model`: one line "base64 rank" for each token, in order."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
    Path(path).write_text("".join(lines), encoding="ascii")


def read_ranks(path: str | Path) -> list[bytes]:
    """Token bytes by rank; raises ConfigError unless the ranks are 0..n-1 and hold every single byte."""
    path = Path(path)
    lines = read_text(path).splitlines()
    pairs = sorted(_parse_rank(line, number, path) for number, line in enumerate(lines, 1) if line.strip())
    ranks = [token for _, token in pairs]
    known = set(ranks)
    if [rank for rank, _ in pairs] != list(range(len(pairs))) or len(known) != len(ranks):
        raise ConfigError(f"{path} does not give each rank from 0 on to one token; get the file again.")
    missing = [byte for byte in range(256) if bytes([byte]) not in known]
    if missing:
        raise ConfigError(f"{path} has no token for byte {missing[0]}; get the file again.")
    return ranks


def _parse_rank(line: str, number: int, path: Path) -> tuple[int, bytes]:
    try:
        token, rank = line.split()
        return int(rank), base64.b64decode(token, validate=True)
    except (ValueError, binascii.Error):
        raise ConfigError(f"{path}, line {number}: not 'base64 rank'; get the file again (is it a stub?).") from None


def _special_tokens(config: dict, num_ranks: int, path: Path) -> tuple[dict[str, int], set[int]]:
    """Text -> id of all 256 control tokens, and the ids that are not shown.

    Entries past the last slot have no row in the embedding (transformers' video placeholder) and are left out.
    """
    entries = config.get("added_tokens_decoder") or {
        str(num_ranks + offset): {"content": name, "special": name not in VISIBLE_MARKERS}
        for name, offset in KIMI_SPECIAL_OFFSETS.items()
    }
    names = {num_ranks + i: f"<|reserved_token_{num_ranks + i}|>" for i in range(NUM_SPECIAL_TOKENS)}
    hidden = set(names)
    for token_id, name, special in _added_tokens(entries, path):
        if token_id < num_ranks:
            raise ConfigError(f"{path} puts {name!r} at id {token_id}, which is an ordinary token.")
        if token_id in names:
            names[token_id] = name
            if not special:
                hidden.discard(token_id)
    special_tokens = {name: token_id for token_id, name in names.items()}
    _check_names(special_tokens, path)
    return special_tokens, hidden


def _added_tokens(entries: Any, path: Path) -> list[tuple[int, str, bool]]:
    try:
        items = [(int(key), entry["content"], entry) for key, entry in entries.items()]
        for _, name, _ in items:
            name.encode()
        return [(i, name, bool(entry.get("special", name not in VISIBLE_MARKERS))) for i, name, entry in items]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: added_tokens_decoder must map ids to objects with a 'content' text.") from error


def _check_names(special_tokens: dict[str, int], path: Path) -> None:
    if len(special_tokens) != NUM_SPECIAL_TOKENS or "" in special_tokens:
        raise ConfigError(f"{path}: added_tokens_decoder names one control token twice or leaves a name empty.")
    missing = [name for name in REQUIRED_MARKERS if name not in special_tokens]
    if missing:
        raise ConfigError(f"{path}: added_tokens_decoder does not name {', '.join(missing)} among the control tokens.")


def _token_name(config: dict, key: str, special_tokens: dict[str, int], path: Path) -> str:
    value = config.get(key)
    name = value.get("content") if isinstance(value, dict) else value
    if name is None:
        return "[BOS]" if key == "bos_token" else "[EOS]"
    if not isinstance(name, str) or name not in special_tokens:
        raise ConfigError(f"{path}: {key} {name!r} is not one of the control tokens.")
    return name


def _check_fast_tokenizer(path: Path, special_tokens: dict[str, int]) -> None:
    """A tokenizer.json beside the ranks is not used; if its control tokens differ, other tools would read other ids."""
    if not path.exists():
        return
    added = read_json(path).get("added_tokens") or []
    for entry in added if isinstance(added, list) else []:
        name, token_id = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        if isinstance(name, str) and special_tokens.get(name, token_id) != token_id:
            raise ConfigError(
                f"{path} gives {name} the id {token_id}, but tiktoken.model gives {special_tokens[name]}; "
                f"remove {path.name}."
            )


def _alternation(words: Iterable[str]) -> str:
    """A regular expression for any of `words`, the longest first, with shared beginnings factored out.

    Without the factoring each "<" of a long text would be tried against more than 200 names.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branch(tree)


def _branch(node: dict[str, Any]) -> str:
    options = [re.escape(character) + _branch(child) for character, child in node.items() if character]
    if not options:
        return ""
    joined = options[0] if len(options) == 1 and "" not in node else f"(?:{'|'.join(options)})"
    return joined + ("?" if "" in node else "")


def _cut_positions(text: str) -> list[int]:
    """Where Kimi's loader cuts `text`: every MAX_CHUNK_CHARS, and after MAX_RUN_CHARS of a run within a chunk."""
    if len(text) <= MAX_RUN_CHARS:
        return []
    cuts = []
    for start in range(0, len(text), MAX_CHUNK_CHARS):
        cuts.append(start)
        for run in _RUNS.finditer(text, start, min(start + MAX_CHUNK_CHARS, len(text))):
            cuts.extend(range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS))
    return cuts
