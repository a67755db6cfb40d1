"""`python -m models.kimi_k25.synthetic --out DIR`: a checkpoint of any size in the exact layout of Kimi-K2.5.

Made-up weights, the same for the same seed, written as a stream: memory does not grow with the size. A file gets its
name only when it is whole, and a run that was cut short goes on with the files that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import FULL_CONFIG, TINY_CHECKPOINT
from engine.json_files import read_json
from engine.loading.checksums import SUMS_NAME, write_sums
from engine.loading.weights import INDEX_NAME
from engine.tokenizer import NUM_SPECIAL_TOKENS, synthetic_ranks, write_ranks
from models.kimi_k25.layout import PlannedFile, plan_files
from models.kimi_k25.synthetic_values import Values

PART = ".part"
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id")


@dataclass(frozen=True)
class Plan:
    """config: the dict of config.json. is_sparse: files of their full size without data, which read as zeros."""

    config: dict[str, Any]
    files: list[PlannedFile]
    seed: int
    is_sparse: bool

    @classmethod
    def of(
        cls,
        changes: dict[str, Any],
        vision: dict[str, Any] | None = None,
        num_files: int | None = None,
        seed: int = 0,
        is_sparse: bool = False,
    ) -> Plan:
        """changes, vision: keys of the real model's text_config and vision_config with other values; a vision tower of
        no layers is left out, and its projector with it. Raises ValueError."""
        config = _changed(read_json(FULL_CONFIG / "config.json"), changes, vision or {})
        made = {"synthetic": "no data" if is_sparse else f"seed {seed}"}
        return cls(config, plan_files(config, num_files, made), seed, is_sparse)

    @property
    def num_tensors(self) -> int:
        return sum(len(file.tensors) for file in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def sentence(self) -> str:
        size = self.num_bytes
        return f"{len(self.files)} files, {self.num_tensors} tensors, {size / 2**30:.2f} GiB ({size / 1e9:.2f} GB)"


def _changed(raw: dict[str, Any], changes: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """The configuration with other sizes; token ids keep their places at the end of the vocabulary."""
    text = raw["text_config"] | changes
    text["num_key_value_heads"] = text["num_attention_heads"]
    if "num_experts_per_tok" not in changes:
        text["num_experts_per_tok"] = min(text["num_experts_per_tok"], text["n_routed_experts"])
    if text["vocab_size"] < 2 * NUM_SPECIAL_TOKENS:
        raise ValueError(f"vocab_size={text['vocab_size']} holds no 256 bytes and 256 control tokens; use 512 or more.")
    moved = text["vocab_size"] - raw["text_config"]["vocab_size"]
    seen = raw["vision_config"] | {"text_hidden_size": text["hidden_size"]} | vision
    raw = raw | {"text_config": text, "vision_config": seen}
    if not seen["vt_num_hidden_layers"]:
        del raw["vision_config"]
    for part in (raw, text):
        part.update({key: part[key] + moved for key in _TOKEN_KEYS if key in part and key not in changes})
    return raw


def write(plan: Plan, directory: Path, workers: int = 1) -> None:
    """Writes what is missing of the checkpoint; the index comes last, so that without it nothing is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    values = None if plan.is_sparse else Values(plan.seed)
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda file: write_file(file, directory, values), plan.files):
            pass
    _write_tokenizer(plan.config["text_config"]["vocab_size"], directory)
    _write_json(directory / "generation_config.json", _generation_config(plan.config))
    shutil.copyfile(TINY_CHECKPOINT / "chat_template.jinja", directory / "chat_template.jinja")
    _write_json(directory / "config.json", plan.config)
    weight_map = {tensor.name: file.name for file in plan.files for tensor in file.tensors}
    total = {"total_size": plan.num_bytes}
    _write_json(directory / INDEX_NAME, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})


def write_file(file: PlannedFile, directory: Path, values: Values | None) -> None:
    """One file, unless it is there already with this header and size; without `values` its data is a hole."""
    path, header = directory / file.name, file.header()
    size = len(header) + file.num_bytes
    if _is_there(path, header, size):
        return
    part = path.with_name(path.name + PART)
    with open(part, "wb", buffering=0) as stream:
        _write_all(stream, memoryview(header))
        for tensor in file.tensors if values is not None else ():
            for chunk in values.chunks(tensor):
                _write_all(stream, chunk)
        stream.truncate(size)
        os.fsync(stream.fileno())
    os.replace(part, path)


def _is_there(path: Path, header: bytes, size: int) -> bool:
    if not path.is_file() or path.stat().st_size != size:
        return False
    with open(path, "rb") as stream:
        return stream.read(len(header)) == header


def _write_all(stream: Any, data: memoryview) -> None:
    while data:
        data = data[stream.write(data) :]


def _write_json(path: Path, value: Any) -> None:
    part = path.with_name(path.name + PART)
    part.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(part, path)


def _write_tokenizer(vocab_size: int, directory: Path) -> None:
    """Made-up words, with Kimi's control tokens at the last 256 ids."""
    write_ranks(directory / "tiktoken.model", synthetic_ranks(vocab_size))
    config = read_json(TINY_CHECKPOINT / "tokenizer_config.json")
    tiny = read_json(TINY_CHECKPOINT / "config.json")["text_config"]["vocab_size"] - NUM_SPECIAL_TOKENS
    moved = vocab_size - NUM_SPECIAL_TOKENS - tiny
    tokens = config["added_tokens_decoder"]
    config["added_tokens_decoder"] = {str(int(number) + moved): token for number, token in tokens.items()}
    _write_json(directory / "tokenizer_config.json", config)


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    values, text = read_json(FULL_CONFIG / "generation_config.json"), config["text_config"]
    moved = text["vocab_size"] - (values["pad_token_id"] + 1)
    values["eos_token_id"] = [number + moved for number in values["eos_token_id"]]
    values |= {key: values[key] + moved for key in ("bos_token_id", "pad_token_id")}
    return values | {"max_length": text["max_position_embeddings"]}


_SIZES = {
    "layers": "num_hidden_layers",
    "experts": "n_routed_experts",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "moe_intermediate_size": "moe_intermediate_size",
    "heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}


def parser() -> argparse.ArgumentParser:
    one = argparse.ArgumentParser(prog="python -m models.kimi_k25.synthetic", description=__doc__.splitlines()[0])
    one.add_argument("--out", required=True, metavar="DIR", type=Path)
    one.add_argument("--full", action="store_true", help="the real model's size, 595 GB; else name a size at least")
    for name, key in _SIZES.items():
        one.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{key} instead of the real one")
    one.add_argument("--vision-layers", type=int, metavar="N", help="vt_num_hidden_layers; 0 leaves vision out")
    one.add_argument("--hf-overrides", type=json.loads, default={}, metavar="JSON", help="other keys of text_config")
    one.add_argument("--files", type=int, metavar="N", help="files of equal size, not one a layer")
    one.add_argument("--sparse", action="store_true", help="all headers, no data: files of full size that take no room")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8), help="files written at once")
    one.add_argument("--checksums", action="store_true", help=f"write {SUMS_NAME} too")
    one.add_argument("--dry-run", action="store_true", help="say what would be written, write nothing")
    return one


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    changes = {key: getattr(args, name) for name, key in _SIZES.items() if getattr(args, name) is not None}
    try:
        if not args.full and not changes and not args.hf_overrides:
            raise ValueError("name a size, for example --layers 2 --experts 16, or --full for all 595 GB.")
        vision = {} if args.vision_layers is None else {"vt_num_hidden_layers": args.vision_layers}
        plan = Plan.of(changes | args.hf_overrides, vision, args.files, args.seed, args.sparse)
        if not args.sparse and not args.dry_run:
            _check_room(plan, args.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(plan.sentence() + (", without data" if args.sparse else ""))
    if args.dry_run:
        return 0
    started = time.monotonic()
    write(plan, args.out, max(args.workers, 1))
    if args.checksums:
        write_sums(args.out, [file.name for file in plan.files])
    print(f"{args.out}: written in {time.monotonic() - started:.1f} s")
    return 0


def _check_room(plan: Plan, directory: Path) -> None:
    """Raises ValueError where the disk has no room for the files that are not there yet."""
    there = {path.name for path in directory.glob("*.safetensors")}
    wanted = sum(file.num_bytes for file in plan.files if file.name not in there)
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if wanted > free:
        raise ValueError(
            f"{wanted / 1e9:.1f} GB are needed, {place} has {free / 1e9:.1f} GB free; make it smaller or use --sparse."
        )


if __name__ == "__main__":
    sys.exit(main())
