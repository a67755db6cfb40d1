"""The tokenizer against an independent BPE, byte by byte, and against damaged checkpoint folders."""

from __future__ import annotations

import json
from itertools import pairwise, product
from unittest import mock

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import tokenizer as module
from engine.config import ConfigError
from engine.errors import InvalidRequestError
from engine.tokenizer import (
    KIMI_SPECIAL_OFFSETS,
    VISIBLE_MARKERS,
    IncrementalDecoder,
    Tokenizer,
    read_ranks,
    write_ranks,
)
from tests.tokenizers import added_tokens, byte_ranks, write_tokenizer

RANKS = byte_ranks()
ALPHABET = "aAbtheTHEing 019 \t\r\n'sS.,<|>[]_é\u0301汉字ΩйñǅʰกあĀ𝔸😀👍🏽\u00a0\u3000\x1c\u200d"
TEXTS = st.one_of(st.text(alphabet=ALPHABET, max_size=60), st.text(max_size=30))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_directory(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def reference_encode(text: str) -> list[int]:
    """Kimi's split pattern under the `regex` module, then the textbook merge loop."""
    index = {token: rank for rank, token in enumerate(RANKS)}
    ids = []
    for piece in regex.findall(f"(?V1){module.SPLIT_PATTERN}", text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            ranked = [(index[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in index]
            if not ranked:
                break
            _, i = min(ranked)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [index[part] for part in parts]
    return ids


def kimi_cuts(text: str, chunk: int, run: int) -> list[str]:
    """The pieces of Kimi's loader, counted character by character."""
    pieces = []
    for start in range(0, len(text), chunk):
        length, was_space = 0, None
        pieces.append("")
        for character in text[start : start + chunk]:
            length = length + 1 if character.isspace() == was_space else 1
            was_space = character.isspace()
            if length > run:
                pieces.append("")
                length = 1
            pieces[-1] += character
    return pieces


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_b008_ids_equal_an_independent_bpe(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == reference_encode(text)
    assert tokenizer.decode(ids) == text


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="the in\n<|>\x1c", max_size=120))
@example("a th" * 30)
def test_long_texts_are_cut_where_kimis_loader_cuts(tokenizer, text):
    with mock.patch.object(module, "MAX_CHUNK_CHARS", 39), mock.patch.object(module, "MAX_RUN_CHARS", 7):
        ids = tokenizer.encode(text)
        marked = tokenizer.encode(f"{text}<think>{text}", allow_special=True)
    assert ids == [i for piece in kimi_cuts(text, 39, 7) for i in reference_encode(piece)]
    assert tokenizer.decode(marked, skip_special_tokens=False) == f"{text}<think>{text}"
    assert marked.count(tokenizer.think_begin_id) == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", ["a", " ", "!\x1c", "<|reserved_token_", "the 汉字\n"])
def test_a_million_characters_take_linear_time(tokenizer, unit):
    text = unit * (1_000_000 // len(unit))
    assert tokenizer.decode(tokenizer.encode(text, allow_special=True)) == text


def test_ids_of_a_full_size_vocabulary(tmp_path):
    ranks = [bytes([byte]) for byte in range(256)] + [bytes(pair) for pair in product(range(256), repeat=2)]
    ranks += [bytes(triple) for triple in product(range(2), range(256), range(256))]
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path, ranks[:163584], config={}))
    assert tokenizer.vocab_size == 163840
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.im_end_id, tokenizer.eot_id) == (
        163584,
        163585,
        163586,
        163593,
    )
    assert (tokenizer.tool_section_begin_id, tokenizer.tool_section_end_id) == (163595, 163596)
    assert (tokenizer.tool_call_begin_id, tokenizer.tool_argument_begin_id) == (163597, 163598)
    assert (tokenizer.tool_call_end_id, tokenizer.special_tokens["<|im_middle|>"]) == (163599, 163601)
    assert (tokenizer.think_begin_id, tokenizer.think_end_id, tokenizer.pad_id) == (163606, 163607, 163839)
    assert tokenizer.token_bytes(163589) == b"<|reserved_token_163589|>"


def test_b008_every_id_of_the_vocabulary_decodes(tokenizer):
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.decode([token_id], skip_special_tokens=False) == tokenizer.token_bytes(token_id).decode(
            errors="replace"
        )
    assert len({tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}) == tokenizer.vocab_size
    for outside in (-1, tokenizer.vocab_size):
        with pytest.raises(InvalidRequestError, match=r"not in the vocabulary"):
            tokenizer.decode([outside])


def test_b006_markers_are_control_tokens_only_when_allowed(tokenizer):
    assert len(tokenizer.special_tokens) == 256
    for name, token_id in tokenizer.special_tokens.items():
        assert tokenizer.encode(f"a{name}b", allow_special=True) == [ord("a"), token_id, ord("b")]
        assert max(tokenizer.encode(name)) < len(RANKS)
        assert tokenizer.decode(tokenizer.encode(name)) == name


def test_skipping_keeps_the_markup_of_the_answer(tokenizer):
    for name, token_id in tokenizer.special_tokens.items():
        assert tokenizer.decode([token_id]) == (name if name in VISIBLE_MARKERS else "")
        assert tokenizer.is_hidden(token_id) == (name not in VISIBLE_MARKERS)


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00 ok", "\ud83d\ude00"])
def test_lone_surrogates_are_refused(tokenizer, text):
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        tokenizer.encode(text)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_incremental_decoding_equals_decoding_at_once(tokenizer, data):
    ids = data.draw(st.lists(st.one_of(st.integers(128, 255), st.integers(0, tokenizer.vocab_size - 1)), max_size=40))
    ids = data.draw(st.sampled_from([ids, tokenizer.encode(data.draw(TEXTS))]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    skip = data.draw(st.booleans())
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    pieces = [decoder.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


def test_no_half_character_is_ever_emitted(tokenizer):
    text = "👍🏽 汉字 e\u0301"
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push([byte]) for byte in text.encode()]
    assert "".join(pieces) == text and "�" not in "".join(pieces)
    assert decoder.finish() == ""


def test_an_incomplete_last_character_is_one_replacement_mark(tokenizer):
    ids = list("a😀".encode()[:-1])
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push([i]) for i in ids] == ["a", "", "", ""]
    assert decoder.finish() == "�"
    assert tokenizer.decode(ids) == "a�"


def test_a_folder_without_names_uses_kimis_offsets(tmp_path):
    for config in ({}, {"model_max_length": 8}):
        tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path / str(len(config)), config=config))
        for name, offset in KIMI_SPECIAL_OFFSETS.items():
            assert tokenizer.special_tokens[name] == len(RANKS) + offset
        assert tokenizer.decode([tokenizer.think_end_id]) == "</think>"


def test_names_and_flags_come_from_the_config(tmp_path):
    tokens = added_tokens(len(RANKS))
    tokens[str(len(RANKS) + 5)] = {"content": "<|mine|>", "special": False}
    tokens[str(len(RANKS) + 300)] = {"content": "<|kimi_k25_video_placeholder|>", "special": True}
    del tokens[str(len(RANKS) + 22)], tokens[str(len(RANKS) + 23)]
    config = {"added_tokens_decoder": tokens, "eos_token": {"content": "<|im_end|>"}}
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path, config=config))
    assert tokenizer.encode("<|mine|>", allow_special=True) == [len(RANKS) + 5]
    assert tokenizer.decode([len(RANKS) + 5]) == "<|mine|>"
    assert tokenizer.eos_id == tokenizer.im_end_id
    assert tokenizer.think_begin_id is None and "<think>" not in tokenizer.special_tokens
    assert "<|kimi_k25_video_placeholder|>" not in tokenizer.special_tokens


def test_b009_code_of_the_folder_is_never_run(tmp_path):
    write_tokenizer(tmp_path)
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass TikTokenTokenizer: pass\n"
    (tmp_path / "tokenization_kimi.py").write_text(trap)
    (tmp_path / "tool_declaration_ts.py").write_text(trap)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    Tokenizer.from_directory(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_b007_another_id_in_tokenizer_json_stops_the_start(tmp_path):
    write_tokenizer(tmp_path)
    entry = {"id": len(RANKS) + 22, "content": "<think>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [entry]}))
    Tokenizer.from_directory(tmp_path)
    entry["id"] += 1
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [entry]}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json gives <think> the id"):
        Tokenizer.from_directory(tmp_path)


def _garble(text: str):
    return lambda folder: (folder / "tiktoken.model").write_text(text)


def _configure(config: object):
    return lambda folder: (folder / "tokenizer_config.json").write_text(json.dumps(config))


TOKENS = added_tokens(len(RANKS))
FIRST = str(len(RANKS))
DAMAGES = {
    "no ranks": (lambda folder: (folder / "tiktoken.model").unlink(), r"Cannot read .*tiktoken\.model"),
    "a stub": (_garble("version https://git-lfs.github.com/spec/v1\n"), r"tiktoken\.model, line 1: not 'base64 rank'"),
    "no base64": (_garble("!!! 0\n"), r"tiktoken\.model, line 1"),
    "an empty file": (_garble(""), r"tiktoken\.model has no token for byte 0"),
    "a gap": (_garble("AA== 0\nAQ== 2\n"), r"tiktoken\.model does not give each rank"),
    "a rank twice": (_garble("AA== 0\nAQ== 0\n"), r"tiktoken\.model does not give each rank"),
    "a token twice": (_garble("AA== 0\nAA== 1\n"), r"tiktoken\.model does not give each rank"),
    "missing bytes": (lambda folder: write_ranks(folder / "tiktoken.model", RANKS[:255]), "no token for byte 255"),
    "no JSON": (lambda folder: (folder / "tokenizer_config.json").write_text("{"), r"Cannot read .*tokenizer_config"),
    "a list": (_configure([]), r"tokenizer_config\.json must hold a JSON object"),
    "a name twice": (_configure({"added_tokens_decoder": TOKENS | {FIRST: {"content": "[EOS]"}}}), "twice"),
    "no end marker": (
        _configure({"added_tokens_decoder": {FIRST: {"content": "[BOS]"}}}),
        r"does not name \[EOS\], <\|im_end\|>",
    ),
    "an ordinary id": (_configure({"added_tokens_decoder": TOKENS | {"7": {"content": "x"}}}), "ordinary token"),
    "no content": (_configure({"added_tokens_decoder": {FIRST: 3}}), "must map ids to objects"),
    "no id": (_configure({"added_tokens_decoder": {"x": {"content": "x"}}}), "must map ids to objects"),
    "a list of tokens": (_configure({"added_tokens_decoder": ["x"]}), "must map ids to objects"),
    "an unknown eos": (_configure({"added_tokens_decoder": TOKENS, "eos_token": "</s>"}), "eos_token '</s>'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders_are_refused_by_name(tmp_path, name):
    damage, message = DAMAGES[name]
    damage(write_tokenizer(tmp_path))
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_ranks_survive_writing_and_reading(tmp_path):
    write_ranks(tmp_path / "tiktoken.model", RANKS)
    assert read_ranks(tmp_path / "tiktoken.model") == RANKS


@pytest.mark.parametrize("vocab_size", [512, 513, 5000, 163840])
def test_a_synthetic_tokenizer_gives_text_back(vocab_size):
    tokenizer = Tokenizer.synthetic(vocab_size)
    assert tokenizer.vocab_size == vocab_size and tokenizer.eos_id == vocab_size - 255
    text = "".join(map(chr, range(0x250))) + " the evening 汉字 😀 <think> " + "\r\n\t 1234567"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and max(ids) < vocab_size - 256
    assert tokenizer.encode("<think>", allow_special=True) == [tokenizer.think_begin_id]
    assert all(tokenizer.encode(tokenizer.token_bytes(i).decode()) == [i] for i in range(256, vocab_size - 256, 997))
    assert Tokenizer.synthetic(vocab_size).encode(text) == ids


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(ConfigError, match="512"):
        Tokenizer.synthetic(511)


@pytest.mark.parametrize("tokenizer", [Tokenizer.synthetic(512), Tokenizer.synthetic(3000)])
def test_no_token_is_longer_than_the_longest(tokenizer):
    lengths = [len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
    assert tokenizer.max_token_bytes == max(lengths) == len("<|tool_call_argument_begin|>")
