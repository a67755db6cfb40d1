"""The training loop: packed batches, AdamW, a schedule by the clock, INT4 simulation, an answers-only last stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from models.kimi_k25.training.architecture import Architecture
from models.kimi_k25.training.attention import MaskBuilder, attention_function
from models.kimi_k25.training.dataset import BatchStream, Rows, TokenData
from models.kimi_k25.training.evaluate import targets_of
from models.kimi_k25.training.generation import autocast
from models.kimi_k25.training.model import TinyKimi, token_losses

WARMUP, INT4_FROM, CHAT_FROM = 0.02, 0.80, 0.85
SYNC_EVERY, LOG_SECONDS, SAVE_SECONDS = 8, 10.0, 90.0


@dataclass(frozen=True)
class Settings:
    seconds: float
    rows: int
    row_length: int
    learning_rate: float
    dropout: float
    compile: bool
    seed: int
    weight_decay: float = 0.1
    balance_rate: float = 5e-3
    clip: float = 1.0


class Trainer:
    """Model, optimizer and data of one run."""

    def __init__(
        self,
        architecture: Architecture,
        settings: Settings,
        data: TokenData,
        device: torch.device,
        attention: str,
        log: Callable[[str], None],
    ):
        self.settings, self.device, self.log = settings, device, log
        self.model = TinyKimi(architecture, attention_function(attention))
        self.model.initialise(settings.seed)
        self.model.to(device)
        self.attention = attention
        self.masks = MaskBuilder(attention, device)
        self.data = data
        self.optimizer = self._optimizer()
        self._loss = token_losses
        if settings.compile:
            self._loss = torch.compile(token_losses)
            for layer in self.model.layers:
                layer.compile()
        self._special = architecture.special_id
        self._chat = False
        self._stream = self._open_stream(np.arange(len(self.data.source)), settings.seed)
        self._chat_stream = self._open_stream(self.data.chat_documents(), settings.seed + 1)
        self._batches = iter(self._stream)
        self.steps, self.tokens, self.history = 0, 0, []

    def _optimizer(self) -> torch.optim.Optimizer:
        decayed = [p for n, p in self.model.named_parameters() if p.dim() > 1 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.dim() <= 1 or "embed" in n]
        groups = [
            {"params": decayed, "weight_decay": self.settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        return torch.optim.AdamW(groups, lr=self.settings.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)

    def _open_stream(self, chosen: np.ndarray, seed: int) -> BatchStream:
        s = self.settings
        return BatchStream(self.data, chosen, s.row_length, s.rows, self._special("[PAD]"), seed)

    def _start_chat_stage(self) -> None:
        self._chat = True
        self._stream.close()
        self._stream = self._chat_stream
        self._batches = iter(self._stream)

    def _on_device(self, batch: Rows) -> tuple[Tensor, Tensor, object]:
        opened = (self._special("<think>"), self._special("</think>"))
        targets = targets_of(batch, opened, answers_only=self._chat)
        ids, targets = (torch.from_numpy(x) for x in (batch.tokens, targets))
        if self.device.type == "cuda":
            ids, targets = (x.pin_memory().to(self.device, non_blocking=True) for x in (ids, targets))
        return ids, targets, self.masks.build(batch.documents)

    def learning_rate(self, progress: float) -> float:
        """Short warm-up, then straight down to zero: the last stages still get a rate that moves the weights."""
        factor = min(1.0, (progress + 1e-3) / WARMUP) * max(0.0, 1.0 - progress)
        return self.settings.learning_rate * factor

    def step(self, progress: float, read_loss: bool = True) -> float:
        """One optimizer step; returns the mean loss, or NaN without `read_loss` (which would wait for the device)."""
        if progress >= CHAT_FROM and not self._chat:
            self._start_chat_stage()
        ids, targets, mask = self._on_device(next(self._batches))
        self.model.train()
        self.model.int4.fill_(float(progress >= INT4_FROM))
        self.model.drop.fill_(0.0 if progress >= INT4_FROM else self.settings.dropout)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(progress)
        with autocast(self.device):
            hidden, loads = self.model(ids, mask)
            losses = self._loss(hidden, self.model.lm_head.weight, targets)
        loss = losses.sum() / (targets != -100).sum().clamp_min(1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.balance(loads, self.settings.balance_rate * (1.0 - progress))
        self._last_loads = loads
        self.steps += 1
        self.tokens += ids.numel()
        return loss.item() if read_loss else float("nan")

    def run(self, start: float, save: Callable[[], object]) -> None:
        """Steps until the budget, counted from `start` on the monotonic clock, is used up."""
        begun = time.monotonic()
        last_log = last_save = begun
        while True:
            now = time.monotonic()
            progress = (now - begun) / max(1e-9, start + self.settings.seconds - begun)
            if progress >= 1.0:
                self._stream.close()
                return
            read = self.steps % SYNC_EVERY == 0 or self.device.type == "cpu"
            loss = self.step(progress, read)
            if read and now - last_log >= LOG_SECONDS:
                last_log = now
                self._note(progress, loss)
            if now - last_save >= SAVE_SECONDS:
                last_save = now
                save()

    def _note(self, progress: float, loss: float) -> None:
        spread = max(float(load.max() / load.mean()) for load in self._last_loads)
        self.history.append(
            {"progress": round(progress, 4), "step": self.steps, "tokens": self.tokens, "loss": round(loss, 4)}
        )
        self.log(
            f"{progress:6.1%} step {self.steps} {self.tokens / 1e6:.1f} M tokens, epoch {self._stream.epoch}, "
            f"loss {loss:.3f}, busiest expert {spread:.2f}x"
        )

    def time_steps(self, count: int) -> dict[str, float]:
        """Seconds a step and tokens a second after a warm-up, losses first and last."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        first = self.step(0.02)
        self.step(0.02)
        start = time.monotonic()
        for _ in range(count - 1):
            self.step(0.02, read_loss=False)
        last = self.step(0.02)
        seconds = (time.monotonic() - start) / count
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        rate = self.settings.rows * self.settings.row_length / seconds
        return {
            "step_ms": round(seconds * 1e3, 1),
            "tokens_per_s": round(rate),
            "first_loss": round(first, 3),
            "last_loss": round(last, 3),
            "memory_gib": round(memory, 1),
        }

    def evaluation_model(self) -> TinyKimi:
        """The same weights in a model that is not compiled and takes the plain attention mask."""
        model = TinyKimi(self.model.a, attention_function("sdpa")).to(self.device)
        model.load_state_dict(self.model.state_dict())
        return model.eval()

    def facts(self) -> dict:
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        numbers = {"steps": self.steps, "tokens": self.tokens, "attention": self.attention, "device": device}
        epochs = self.tokens / len(self.data.tokens)
        return numbers | {
            "epochs": round(epochs, 2),
            "torch": torch.__version__,
            "settings": asdict(self.settings),
            "loss": self.history,
        }
