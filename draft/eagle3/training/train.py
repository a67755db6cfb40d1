"""Lets a target write, trains a draft on what it wrote, measures and exports it, all within a wall-clock budget.

    python -m draft.eagle3.training.train --target models.kimi_k25.training.draft_target:load_target \\
        --checkpoint models/kimi_k25/tiny --data .draft-data --out OUT --minutes 5

DATA holds prompts.npz. OUT receives the draft in OUT/draft (config.json, model.safetensors, README.md), report.json and
train.log; the export is renewed during training, so that a run that is cut short leaves a draft. `--device cpu` with
small limits tries the whole way.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from draft.eagle3.training import export
from draft.eagle3.training.card import draft_card
from draft.eagle3.training.evaluate import accept_lengths
from draft.eagle3.training.incremental import largest_difference
from draft.eagle3.training.model import DraftModel, DraftShape
from draft.eagle3.training.store import FeatureStore
from draft.eagle3.training.target import Target, load_target
from draft.eagle3.training.text import Prompts, Text, Writing, write_text
from draft.eagle3.training.trainer import Settings, Trainer
from draft.eagle3.training.vocabulary import choose_tokens, coverage, offsets

CHECKED_SEQUENCES, CHECKED_TOKENS = 4, 128


class Log:
    """Lines with the seconds since the start, on the screen and in a file."""

    def __init__(self, path: Path):
        self._start = time.monotonic()
        self._file = path.open("w", encoding="utf-8")

    def __call__(self, message: str) -> None:
        line = f"[{time.monotonic() - self._start:6.1f} s] {message}"
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="module:function that loads the target from its folder")
    parser.add_argument("--checkpoint", type=Path, required=True, help="the target's folder")
    parser.add_argument("--data", type=Path, default=Path(".draft-data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0, help="of training alone")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--write-seconds", type=float, default=90.0, help="of the target's writing")
    parser.add_argument("--max-new", type=int, default=192)
    parser.add_argument("--write-batch", type=int, default=4096)
    parser.add_argument("--max-prompts", type=int, help="training prompts; all by default")
    parser.add_argument("--max-held-out", type=int, help="held-out prompts; all by default")
    parser.add_argument("--max-tokens", type=int, default=20_000_000, help="of prompts and answers, as memory allows")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--max-updates", type=int)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--layers", type=int, nargs="+", default=(1, 2, 4))
    parser.add_argument("--draft-vocab", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def settings_from(arguments: argparse.Namespace) -> Settings:
    return Settings(
        seconds=arguments.minutes * 60,
        batch_tokens=arguments.batch_tokens,
        steps=arguments.steps,
        learning_rate=arguments.lr,
        seed=arguments.seed,
        max_updates=arguments.max_updates,
    )


def chosen_prompts(prompts: Prompts, held_out: bool, most: int | None, seed: int) -> np.ndarray:
    chosen = np.flatnonzero(prompts.held_out == held_out)
    return np.random.default_rng(seed).permutation(chosen)[:most]


def write_all(
    arguments: argparse.Namespace, target: Target, prompts: Prompts, log: Callable[[str], None]
) -> tuple[Text, Text, Writing]:
    """(held-out text, all greedy; training text; how the latter was written)."""
    writing = Writing(
        max_new=arguments.max_new,
        batch=arguments.write_batch,
        seconds=arguments.write_seconds,
        max_tokens=arguments.max_tokens,
    )
    greedy = Writing(max_new=arguments.max_new, batch=arguments.write_batch, greedy_share=1.0, seconds=float("inf"))
    kept = chosen_prompts(prompts, True, arguments.max_held_out, arguments.seed)
    held_out = write_text(target, prompts, kept, greedy, arguments.seed, log)
    chosen = chosen_prompts(prompts, False, arguments.max_prompts, arguments.seed)
    return held_out, write_text(target, prompts, chosen, writing, arguments.seed + 1, log), writing


def new_draft(arguments: argparse.Namespace, target: Target, text: Text) -> tuple[DraftModel, float]:
    """(the draft at its start, the share of the target's words that it can guess)."""
    counts = np.bincount(text.tokens[text.written()], minlength=target.vocab_size)
    tokens = choose_tokens(counts, arguments.draft_vocab, [*target.special_ids, *target.stop_ids])
    shape = DraftShape(
        vocab_size=target.vocab_size,
        width=target.width,
        draft_vocab_size=arguments.draft_vocab,
        feature_layers=tuple(arguments.layers),
        max_positions=target.max_positions,
        eps=target.eps,
    )
    model = DraftModel(shape, target.embedding.float())
    model.initialise(arguments.seed, offsets(tokens), target.head.float().cpu(), target.final_norm.float().cpu())
    return model.to(target.device), coverage(counts, tokens)


def watcher(trainer: Trainer, folder: Path, held_out: FeatureStore, sources: list[str]) -> Callable[[], None]:
    """Saves the draft and says how it fares."""

    def watch() -> None:
        export.export(trainer.model, folder)
        lengths = accept_lengths(trainer.model, held_out, sources, (3,))
        told = ", ".join(f"{name} {entry['accept_length']['3']}" for name, entry in lengths.items())
        trainer.log(f"accept length at k = 3: {told}")

    return watch


def inference_gap(folder: Path, target: Target, held_out: FeatureStore, steps: int) -> float:
    """The exported draft by the formulas of inference against the training graph, float32 on the CPU."""
    model = export.load(folder, target.embedding)
    largest, lengths = 0.0, held_out.text.lengths()
    for row in np.argsort(-np.minimum(lengths, CHECKED_TOKENS), kind="stable")[:CHECKED_SEQUENCES]:
        batch = held_out.batch(np.asarray([row]))
        length = min(int(lengths[row]), CHECKED_TOKENS)
        starts = sorted({max(start, 0) for start in (0, length // 2 - steps, length - steps - 2)})
        features, ids = batch.features[0, :length].float().cpu(), batch.ids[0, :length].cpu()
        largest = max(largest, largest_difference(model, features, ids, starts, steps))
    return largest


def facts(arguments: argparse.Namespace, trainer: Trainer, text: Text, covered: float, writing: Writing) -> dict:
    device = trainer.device
    return {
        "shape": asdict(trainer.model.shape),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "coverage": covered,
        "text_prompts": len(text),
        "text_tokens": len(text.tokens),
        "written_tokens": int(text.written().sum()),
        "greedy_share": writing.greedy_share,
        "temperatures": writing.temperatures,
        "steps": arguments.steps,
        "updates": trainer.updates,
        "seen_tokens": trainer.tokens,
        "train_seconds": trainer.seconds,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "settings": asdict(trainer.settings),
        "history": trainer.history,
    }


def main(words: list[str] | None = None) -> None:
    arguments = parse_arguments(words)
    folder = arguments.out / "draft"
    folder.mkdir(parents=True, exist_ok=True)
    log = Log(arguments.out / "train.log")
    device = torch.device(arguments.device)
    target = load_target(arguments.target, arguments.checkpoint, device)
    prompts = Prompts.load(arguments.data / "prompts.npz")
    log(f"{len(prompts):,} prompts, {int(prompts.held_out.sum()):,} of them held out")
    kept, text, writing = write_all(arguments, target, prompts, log)
    held_out = FeatureStore(target, kept, arguments.layers)
    store = FeatureStore(target, text, arguments.layers)
    model, covered = new_draft(arguments, target, text)
    log(f"states of {len(text.tokens):,} tokens are kept; the draft can guess {covered:.2%} of what was written")
    trainer = Trainer(model, target.head.detach(), store, settings_from(arguments), log)
    trainer.run(watcher(trainer, folder, held_out, prompts.sources))
    size = export.export(model, folder)
    log(f"exported {size:,} bytes; measuring what was exported")
    stored = export.load(folder, target.embedding).to(device)
    report = {
        "accept": accept_lengths(stored, held_out, prompts.sources),
        "largest_logit_difference": inference_gap(folder, target, held_out, arguments.steps),
        "training": facts(arguments, trainer, text, covered, writing),
    }
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(draft_card(report), encoding="utf-8")
    for name, entry in report["accept"].items():
        log(f"{name}: accept length {entry['accept_length']}, right by place {entry['acceptance_by_place']}")
    log(f"largest difference between training graph and inference: {report['largest_logit_difference']:.2e}")


if __name__ == "__main__":
    main()
