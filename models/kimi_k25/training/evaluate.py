"""Measures a trained model: held-out loss by source (plain and INT4), greedy answers, and the acceptance rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from models.kimi_k25.training.attention import MaskBuilder
from models.kimi_k25.training.dataset import PADDING, Rows, TokenData, pack
from models.kimi_k25.training.generation import autocast, greedy, stop_ids
from models.kimi_k25.training.model import TinyKimi, token_losses
from models.kimi_k25.training.prompts import PROMPTS, prompt_messages
from models.kimi_k25.training.rendering import Renderer
from models.kimi_k25.training.tool_accuracy import called_tools, read_questions, tool_accuracy

INT4_LOSS_MARGIN = 0.03
DISTINCT_SHARE = 0.8


def targets_of(rows: Rows, opened: tuple[int, int], answers_only: bool = False) -> np.ndarray:
    """Next-token targets [R, S], -100 where there is none: at a document's last token, in padding, and for the
    `</think>` of an instant turn, which the prompt gives. `opened` are the ids of `<think>` and `</think>`."""
    targets = np.full(rows.tokens.shape, -100, np.int64)
    following = rows.tokens[:, 1:]
    wanted = (rows.documents[:, 1:] == rows.documents[:, :-1]) & (rows.documents[:, 1:] != PADDING)
    wanted &= ~((rows.tokens[:, :-1] == opened[0]) & (following == opened[1]))
    if answers_only:
        wanted &= rows.answer[:, 1:]
    targets[:, :-1][wanted] = following[wanted]
    return targets


@torch.no_grad()
def held_out_losses(
    model: TinyKimi, data: TokenData, row_length: int, int4: bool, device: torch.device, batch: int = 16
) -> dict[str, float]:
    """Nats a token by source, over all predicted tokens; "answers" is the loss on what the model itself writes."""
    model.eval()
    model.int4.fill_(float(int4))
    special = model.a.special_id
    rows = pack(data, np.arange(len(data.source)), row_length, special("[PAD]"))
    masks = MaskBuilder("sdpa", device)
    sums, counts = np.zeros(len(data.sources) + 1), np.zeros(len(data.sources) + 1)
    for start in range(0, len(rows), batch):
        part = Rows(*(x[start : start + batch] for x in (rows.tokens, rows.documents, rows.answer)))
        targets = targets_of(part, (special("<think>"), special("</think>")))
        with autocast(device):
            hidden, _ = model(torch.from_numpy(part.tokens).to(device), masks.build(part.documents))
            losses = token_losses(hidden, model.lm_head.weight, torch.from_numpy(targets).to(device))
        losses = losses.float().cpu().numpy()
        wanted = targets.ravel() != -100
        source = data.source[np.maximum(part.documents.ravel(), 0)]
        sums[:-1] += np.bincount(source[wanted], losses[wanted], len(data.sources))
        counts[:-1] += np.bincount(source[wanted], minlength=len(data.sources))
        written = wanted & np.roll(part.answer, -1, 1).ravel()
        sums[-1] += losses[written].sum()
        counts[-1] += written.sum()
    names = [*data.sources, "answers"]
    means = {name: round(float(sums[i] / counts[i]), 4) for i, name in enumerate(names) if counts[i]}
    return means | {"all": round(float(sums[:-1].sum() / counts[:-1].sum()), 4)}


def sample_answers(
    model: TinyKimi, renderer: Renderer, device: torch.device, max_new: int = 256, count: int = len(PROMPTS)
) -> list[dict]:
    """Greedy answers to the fixed prompts, with thinking and without."""
    model.int4.fill_(1.0)
    template, tokenizer = renderer.template, renderer.tokenizer
    asked = [(prompt, tools, thinking) for prompt, tools in PROMPTS[:count] for thinking in (True, False)]
    prompts = [template.encode(tokenizer, prompt_messages(p), tools, thinking=t) for p, tools, t in asked]
    stops = stop_ids(model)
    written = greedy(model, prompts, stops, max_new, device)
    answers = []
    for (prompt, tools, thinking), ids in zip(asked, written, strict=True):
        ended = bool(ids) and ids[-1] in stops
        text = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        question = prompt_messages(prompt)[-1]["content"]
        answer = {"question": question, "thinking": thinking, "answer": text, "ended": ended}
        answers.append(
            answer | {"distinct": round(distinct_share(ids), 3), "tools": [t["function"]["name"] for t in tools or []]}
        )
    return answers


def distinct_share(ids: list[int], n: int = 4) -> float:
    """Share of different n-grams; 1.0 for a text too short to have two."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def acceptance(losses: dict[str, float], int4_losses: dict[str, float], answers: list[dict]) -> dict[str, bool]:
    """The rules by which a checkpoint is fit to ship, each with whether it holds."""
    with_tools = [a for a in answers if a["tools"]]
    return {
        "int4_within_margin": int4_losses["all"] - losses["all"] <= INT4_LOSS_MARGIN,
        "answers_end": all(a["ended"] for a in answers),
        "answers_vary": all(a["distinct"] >= DISTINCT_SHARE for a in answers),
        "tool_calls_parse": bool(with_tools) and all(_calls_declared(a) for a in with_tools),
    }


def _calls_declared(answer: dict) -> bool:
    try:
        calls = called_tools(answer["answer"])
    except ValueError:
        return False
    return bool(calls) and all(name in answer["tools"] for name, _ in calls)


def report(
    model: TinyKimi, data_folder: Path, renderer: Renderer, device: torch.device, row_length: int, quick: bool
) -> dict:
    """Everything measured after training. `quick` asks fewer questions and reads less text, for a CPU."""
    held_out = TokenData.load(data_folder / "held_out.tokens.xz")
    if quick:
        held_out = first_documents(held_out, 24)
    plain = held_out_losses(model, held_out, row_length, False, device)
    int4 = held_out_losses(model, held_out, row_length, True, device)
    answers = sample_answers(model, renderer, device, *((16, 2) if quick else ()))
    questions = read_questions(data_folder, quick)
    return {
        "held_out_loss_bf16": plain,
        "held_out_loss_int4": int4,
        "acceptance": acceptance(plain, int4, answers),
        "tool_accuracy": tool_accuracy(model, renderer, questions, device),
        "tool_questions": len(questions),
        "answers": answers,
    }


def first_documents(data: TokenData, count: int) -> TokenData:
    end = data.starts[count]
    return TokenData(data.tokens[:end], data.answer[:end], data.starts[: count + 1], data.source[:count], data.sources)
