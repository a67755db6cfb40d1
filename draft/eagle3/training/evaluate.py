"""Accept lengths of chains on text that the target wrote greedily: what speculation would do, step by step."""

from __future__ import annotations

import numpy as np
import torch

from draft.eagle3.training.model import DraftModel
from draft.eagle3.training.store import FeatureStore, batches_of_rows
from draft.eagle3.training.trainer import autocast


@torch.no_grad()
def right_guesses(model: DraftModel, store: FeatureStore, guesses: int, batch_tokens: int = 32768) -> list[np.ndarray]:
    """For each sequence bool [S, guesses]: whether guess i of a chain behind position t is the text's token t + 2 + i.

    The tokens before it are the text's: a chain's guesses count only as long as they are all right, so this is what
    the chain itself would guess.
    """
    model.eval()
    lengths, found = store.text.lengths(), [np.empty(0)] * len(store.text)
    target_ids = model.target_ids()
    for rows in batches_of_rows(lengths, np.argsort(lengths, kind="stable"), batch_tokens):
        batch = store.batch(rows)
        following = torch.nn.functional.pad(batch.ids, (0, guesses + 2), value=-1)
        right = []
        with autocast(batch.ids.device):
            for step, stream in enumerate(model.unroll(batch.features, batch.ids, guesses)):
                guessed = target_ids[model.logits(stream).argmax(-1)]
                right.append(guessed == following[:, step + 2 : step + 2 + guessed.shape[1]])
        right = torch.stack(right, -1).cpu().numpy()
        for row, of_row in zip(rows, right, strict=True):
            found[row] = of_row[: lengths[row]]
    return found


def walk(right: np.ndarray, prompt_length: int, guesses: int) -> list[int]:
    """Tokens committed by each verify step of one sequence, the bonus included.

    right: bool [S, at least `guesses`]. The first new token comes from prefill. A step whose last committed token is
    t + 1 verifies guesses of tokens t + 2 ...; what lies beyond the end of the text is not committed.
    """
    end, position, committed = len(right), prompt_length - 1, []
    while position + 2 < end:
        accepted = int(np.argmin(np.append(right[position, :guesses], False)))
        committed.append(min(accepted + 1, end - (position + 2)))
        position += committed[-1]
    return committed


def accept_lengths(
    model: DraftModel, store: FeatureStore, sources: list[str], guesses: tuple[int, ...] = tuple(range(1, 8))
) -> dict[str, dict]:
    """By source and over "all": sequences, verify steps at each number of guesses, accept length at each, and the
    share of guesses that are right at each place of a chain of the longest kind, given that those before are."""
    right = right_guesses(model, store, max(guesses))
    of_source = [sources[i] for i in store.text.source]
    table = {}
    for name in (*sorted(set(of_source)), "all"):
        chosen = [i for i, source in enumerate(of_source) if name in (source, "all")]
        entry: dict = {"sequences": len(chosen), "accept_length": {}, "steps": {}}
        for k in guesses:
            steps = [n for i in chosen for n in walk(right[i], int(store.text.prompt_lengths[i]), k)]
            entry["steps"][str(k)] = len(steps)
            entry["accept_length"][str(k)] = round(sum(steps) / len(steps), 3) if steps else None
        entry["acceptance_by_place"] = _acceptance([right[i] for i in chosen], store, chosen, max(guesses))
        table[name] = entry
    return table


def _acceptance(right: list[np.ndarray], store: FeatureStore, chosen: list[int], guesses: int) -> list[float | None]:
    """Over every position of the target's own text from which a whole chain fits."""
    starts = [int(store.text.prompt_lengths[i]) - 1 for i in chosen]
    rows = [r[start : max(len(r) - 1 - guesses, start), :guesses] for r, start in zip(right, starts, strict=True)]
    alive = np.cumprod(np.concatenate(rows).astype(np.int64), axis=1).sum(0)
    reached = [sum(map(len, rows)), *alive[:-1].tolist()]
    return [round(int(a) / n, 4) if n else None for a, n in zip(alive, reached, strict=True)]
