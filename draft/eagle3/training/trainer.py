"""The training loop: soft cross-entropy against the target at every step of the unroll, a schedule by the clock.

Shape letters: B sequences, S positions, D width, V draft vocabulary, M rows that count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draft.eagle3.training.model import DraftModel
from draft.eagle3.training.store import Batch, FeatureStore

WARMUP, LAST_RATE = 0.02, 0.01
LOG_SECONDS, COUNT_EVERY = 20.0, 8


@dataclass(frozen=True)
class Settings:
    """decay: the weight of each step's loss relative to the one before. prompt_weight: that of rows whose next tokens
    the target did not write. max_updates: the run also ends there, and the schedule follows what is nearer its end."""

    seconds: float
    batch_tokens: int = 32768
    steps: int = 5
    decay: float = 0.8
    prompt_weight: float = 0.1
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.01
    clip: float = 0.5
    seed: int = 0
    max_updates: int | None = None


@dataclass
class Figures:
    """Sums over the rows of the target's own text: losses and right guesses by step."""

    loss: Tensor
    right: Tensor
    rows: Tensor

    @classmethod
    def zeros(cls, steps: int, device: torch.device) -> Figures:
        return cls(*(torch.zeros(steps, device=device) for _ in range(3)))

    def means(self) -> tuple[list[float], list[float]]:
        rows = self.rows.clamp_min(1)
        return (self.loss / rows).tolist(), (self.right / rows).tolist()


def autocast(device: torch.device):
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def row_weights(batch: Batch, step: int, prompt_weight: float) -> Tensor:
    """[B, S] float32: 0 where step `step` predicts nothing that is known.

    Position t predicts token t + 2 + step. Its chain starts behind token t + 1, which in use is never a prompt's: the
    target has drawn it. Such rows count fully, the others by `prompt_weight`.
    """
    shift = step + 2
    known, drawn = torch.zeros_like(batch.valid), torch.zeros_like(batch.valid)
    if batch.valid.shape[1] > shift:
        known[:, :-shift] = batch.valid[:, shift:]
        drawn[:, :-1] = batch.written[:, 1:]
    return known.float() * torch.where(drawn, 1.0, prompt_weight)


def batch_loss(
    model: DraftModel, head: Tensor, batch: Batch, settings: Settings, figures: Figures | None = None
) -> Tensor:
    """The weighted mean loss of a batch. head: the target's [vocab, D]."""
    draft_head, target_ids = head[model.target_ids()], model.target_ids()
    total = torch.zeros((), device=head.device)
    for step, stream in enumerate(model.unroll(batch.features, batch.ids, settings.steps)):
        weights = row_weights(batch, step, settings.prompt_weight)
        rows, columns = weights.nonzero(as_tuple=True)
        states = batch.hidden[rows, columns + step + 1]
        weights, logits = weights[rows, columns], model.logits(stream[rows, columns]).float()
        wanted = F.linear(states, draft_head.to(states.dtype)).float().softmax(-1)
        losses = F.cross_entropy(logits, wanted, reduction="none")
        total = total + settings.decay**step * (losses * weights).sum() / weights.sum().clamp_min(1)
        if figures is not None:
            _count(figures, step, losses, logits, F.linear(states, head.to(states.dtype)), target_ids, weights == 1)
    return total


@torch.no_grad()
def _count(
    figures: Figures, step: int, losses: Tensor, logits: Tensor, wanted: Tensor, target_ids: Tensor, own: Tensor
) -> None:
    right = target_ids[logits.argmax(-1)] == wanted.argmax(-1)
    figures.loss[step] += (losses * own).sum()
    figures.right[step] += (right & own).sum()
    figures.rows[step] += own.sum()


class Trainer:
    """One run over a store; `progress` goes from 0 to 1 with the clock."""

    def __init__(
        self, model: DraftModel, head: Tensor, store: FeatureStore, settings: Settings, log: Callable[[str], None]
    ):
        self.model, self.head, self.settings, self.log = model, head, settings, log
        self.device = head.device
        self._batches = store.stream(settings.batch_tokens, settings.seed)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=fused)
        self.updates, self.tokens, self.seconds, self.history = 0, 0, 0.0, []

    def run(self, watch: Callable[[], None] = lambda: None, watch_seconds: float = 60.0) -> None:
        """Trains until the time is over; `watch` is called about every `watch_seconds`, on the clock of the run."""
        start = logged = watched = time.monotonic()
        figures, tokens = self._figures(), 0
        while (progress := self._progress(elapsed := time.monotonic() - start)) < 1:
            batch = next(self._batches)
            self.update(batch, progress, None if self.updates % COUNT_EVERY else figures)
            tokens += batch.ids.numel()
            if time.monotonic() - logged >= LOG_SECONDS:
                self._report(elapsed, figures, tokens / (time.monotonic() - logged))
                figures, tokens, logged = self._figures(), 0, time.monotonic()
            if time.monotonic() - watched >= watch_seconds:
                watch()
                watched = time.monotonic()
        self.seconds = time.monotonic() - start
        self._report(self.seconds, figures, tokens / max(time.monotonic() - logged, 1e-9))

    def update(self, batch: Batch, progress: float, figures: Figures | None = None) -> float | Tensor:
        """One optimizer step; returns the loss, on the device."""
        self.model.train()
        rate = self.settings.learning_rate * self._rate(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with autocast(self.device):
            loss = batch_loss(self.model, self.head, batch, self.settings, figures)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self.tokens += batch.ids.numel()
        if self.device.type == "cuda" and self.updates % 8 == 0:
            torch.cuda.synchronize()  # or the host runs ahead of the clock that the schedule follows
        return loss.detach()

    @staticmethod
    def _rate(progress: float) -> float:
        """Linear warm-up, then a cosine down to `LAST_RATE`."""
        if progress < WARMUP:
            return max(progress / WARMUP, 0.02)
        fallen = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        return LAST_RATE + (1 - LAST_RATE) * fallen

    def _figures(self) -> Figures:
        return Figures.zeros(self.settings.steps, self.device)

    def _progress(self, elapsed: float) -> float:
        done = self.updates / self.settings.max_updates if self.settings.max_updates else 0.0
        return max(elapsed / self.settings.seconds, done)

    def _report(self, elapsed: float, figures: Figures, speed: float) -> None:
        losses, right = figures.means()
        entry = {"seconds": round(elapsed, 1), "updates": self.updates, "loss": losses, "right": right}
        self.history.append(entry)
        self.log(
            f"update {self.updates}, {speed:,.0f} tokens/s, loss by step {' '.join(f'{x:.3f}' for x in losses)}, "
            f"right {' '.join(f'{x:.3f}' for x in right)}"
        )
