"""Greedy continuation of many prompts at once, without a cache."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from models.kimi_k25.training.attention import MaskBuilder
from models.kimi_k25.training.model import TinyKimi


def autocast(device: torch.device):
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def stop_ids(model: TinyKimi) -> set[int]:
    return {model.a.special_id(name) for name in ("<|im_end|>", "[EOS]", "[EOT]")}


@torch.no_grad()
def greedy(
    model: TinyKimi, prompts: list[list[int]], stops: set[int], max_new: int, device: torch.device
) -> list[list[int]]:
    """The most likely continuations, all prompts at once, without a cache; a stop id is kept at the end."""
    model.eval()
    ids = np.full((len(prompts), max(map(len, prompts)) + max_new), model.a.special_id("[PAD]"), np.int64)
    lengths = np.array([len(p) for p in prompts])
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    masks, running = MaskBuilder("sdpa", device), np.ones(len(prompts), bool)
    for _ in range(max_new):
        width = int(-(-lengths.max() // 32) * 32)
        width = min(width, ids.shape[1])
        with autocast(device):
            batch = torch.from_numpy(ids[:, :width]).to(device)
            hidden, _ = model(batch, masks.build(np.zeros((len(ids), width), np.int32)))
            last = hidden[torch.arange(len(ids)), torch.from_numpy(lengths - 1)]
            chosen = (last.float() @ model.lm_head.weight.float().t()).argmax(-1).cpu().numpy()
        for i in np.flatnonzero(running):
            ids[i, lengths[i]] = chosen[i]
            lengths[i] += 1
            running[i] = int(chosen[i]) not in stops
        if not running.any():
            break
    return [row[len(p) : n].tolist() for row, p, n in zip(ids, prompts, lengths, strict=True)]
