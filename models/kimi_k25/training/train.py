"""Trains the tiny checkpoint within a wall-clock budget and exports it.

    python -m models.kimi_k25.training.train --minutes 8.3 --out OUT          # one GPU
    python -m models.kimi_k25.training.train --smoke --out OUT                # times the steps of each attention
    python -m models.kimi_k25.training.train --device cpu --minutes 10 --out OUT

OUT receives the two shards, the index, report.json and train.log; the export is renewed during training, so that a run
that is cut short leaves a checkpoint. The schedule follows the clock: `progress` runs from 0 to 1 over the budget.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch

from models.kimi_k25.training.architecture import Architecture
from models.kimi_k25.training.attention import KINDS
from models.kimi_k25.training.dataset import TokenData
from models.kimi_k25.training.evaluate import report
from models.kimi_k25.training.export import export
from models.kimi_k25.training.prepare import load_renderer
from models.kimi_k25.training.trainer import Settings, Trainer

TINY = Path(__file__).resolve().parent.parent / "tiny"


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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=8.3, help="wall-clock budget of training, compilation included"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--data", type=Path, default=Path(".train-data"))
    parser.add_argument("--checkpoint", type=Path, default=TINY, help="folder with the tokenizer and the chat template")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, help="rows in a step; 64 on a GPU, 4 on a CPU")
    parser.add_argument("--row-length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--attention", default="auto", choices=("auto", *KINDS))
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="time a few steps of each attention and stop")
    return parser.parse_args()


def settings_from(arguments: argparse.Namespace) -> Settings:
    on_gpu = arguments.device == "cuda"
    return Settings(
        seconds=arguments.minutes * 60,
        rows=arguments.rows or (64 if on_gpu else 4),
        row_length=arguments.row_length,
        learning_rate=arguments.lr,
        dropout=arguments.dropout,
        compile=on_gpu and not arguments.no_compile,
        seed=arguments.seed,
    )


def smoke(arguments: argparse.Namespace, log: Log) -> dict:
    """Steps of every attention, compiled; the first step holds the compilation."""
    results: dict[str, dict] = {}
    data = TokenData.load(arguments.data / "train.tokens.xz")
    for kind in KINDS if arguments.attention == "auto" else (arguments.attention,):
        torch._dynamo.reset()
        start = time.monotonic()
        try:
            trainer = Trainer(Architecture(), settings_from(arguments), data, torch.device(arguments.device), kind, log)
            trainer.step(0.0)
            first = time.monotonic() - start
            results[kind] = trainer.time_steps(20) | {"first_step_s": round(first, 1)}
        except Exception as error:  # a probe: an attention that this machine lacks is a result
            results[kind] = {"error": f"{type(error).__name__}: {error}"[:600]}
        log(f"{kind}: {json.dumps(results[kind])}")
        (arguments.out / "smoke.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def build_trainer(arguments: argparse.Namespace, log: Log) -> Trainer:
    """The first kind of attention that survives one step, where none was asked for by name."""
    device = torch.device(arguments.device)
    data = TokenData.load(arguments.data / "train.tokens.xz")
    log(f"{len(data.tokens):,} training tokens in {len(data.source):,} documents")
    kinds = KINDS if device.type == "cuda" else ("sdpa",)
    if arguments.attention != "auto":
        kinds = (arguments.attention,)
    for kind in kinds:
        try:
            trainer = Trainer(Architecture(), settings_from(arguments), data, device, kind, log)
            loss = trainer.step(0.0)
            if not math.isfinite(loss):
                raise ArithmeticError(f"the first loss is {loss}")
            log(f"attention {kind}: first loss {loss:.3f}")
            return trainer
        except Exception as error:
            if kind == kinds[-1]:
                raise
            log(f"attention {kind} does not run here ({type(error).__name__}: {str(error)[:300]}); trying the next")
            torch._dynamo.reset()
    raise AssertionError("unreachable: the loop returns or raises")


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = Log(arguments.out / "train.log")
    torch.set_float32_matmul_precision("high")
    if arguments.smoke:
        smoke(arguments, log)
        return
    start = time.monotonic()
    trainer = build_trainer(arguments, log)
    trainer.run(start, save=lambda: export(trainer.model, arguments.out))
    total = export(trainer.model, arguments.out)
    log(f"exported {total:,} bytes of tensors")
    device = torch.device(arguments.device)
    quick = device.type == "cpu"
    renderer = load_renderer(arguments.checkpoint)
    measured = report(trainer.evaluation_model(), arguments.data, renderer, device, arguments.row_length, quick)
    measured["training"] = trainer.facts() | {"wall_seconds": round(time.monotonic() - start, 1)}
    (arguments.out / "report.json").write_text(
        json.dumps(measured, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    log(f"held-out loss {measured['held_out_loss_bf16']['all']} plain, {measured['held_out_loss_int4']['all']} INT4")
    for name, holds in measured["acceptance"].items():
        log(f"{name}: {'holds' if holds else 'FAILS'}")
    log(f"tool accuracy over {measured['tool_questions']} unseen tools: {json.dumps(measured['tool_accuracy'])}")
    for answer in measured["answers"]:
        log(f"{answer['question'][:50]!r} thinking={answer['thinking']} -> {answer['answer'][:160]!r}")


if __name__ == "__main__":
    main()
