"""A synthetic tokenizer directory: byte ranks, a few two-letter merges and the 256 special ids in Kimi's order."""

from __future__ import annotations

import base64
import json
from itertools import product
from pathlib import Path

NUM_SPECIALS = 256
LETTERS = b"etaoinsh"
SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
NOT_SPECIAL = (*range(11, 16), 22, 23)  # kept by skip_special_tokens


def num_ranks(num_merges: int) -> int:
    return 256 + num_merges


def write_tokenizer(directory: Path, num_merges: int) -> None:
    """`tiktoken.model` and `tokenizer_config.json`; at most 64 merges."""
    pairs = [bytes(pair) for pair in product(LETTERS, repeat=2)]
    if num_merges > len(pairs):
        raise ValueError(f"at most {len(pairs)} merges.")
    tokens = [bytes([b]) for b in range(256)] + pairs[:num_merges]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (directory / "tiktoken.model").write_text("".join(lines))
    base = num_ranks(num_merges)
    added = {
        str(base + offset): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": offset not in NOT_SPECIAL,
        }
        for offset, text in SPECIALS.items()
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "model_max_length": int(1e30),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
