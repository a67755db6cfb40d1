"""The draft's card, README.md, from the report of its training run.

python -m draft.eagle3.training.card --report OUT/report.json --draft draft/eagle3/tiny
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def accept_table(accept: dict[str, dict]) -> str:
    guesses = list(accept["all"]["accept_length"])
    lines = ["| held-out text | sequences | " + " | ".join(f"k = {k}" for k in guesses) + " |"]
    lines.append("|---" * (len(guesses) + 2) + "|")
    for source, entry in accept.items():
        cells = ["-" if x is None else f"{x:.2f}" for x in entry["accept_length"].values()]
        lines.append(f"| {source} | {entry['sequences']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draft_card(report: dict) -> str:
    run, accept = report["training"], report["accept"]
    shape, steps = run["shape"], accept["all"]["steps"]["3"]
    places = ", ".join(f"{x:.3f}" for x in accept["all"]["acceptance_by_place"] if x is not None)
    low, high = run["temperatures"]
    return f"""---
license: apache-2.0
language: en
---
# EAGLE-3 draft of kimi-k25-tiny

Guesses what the tiny checkpoint in `models/kimi_k25/tiny` writes next, and fits this target alone. One Llama-style
layer of width {shape["width"]} ({shape["heads"]} heads x {shape["head_width"]}, MLP {shape["mlp_width"]}) over the
target's states as they enter layers {", ".join(map(str, shape["feature_layers"]))}; the target's embedding; a head over
the {shape["draft_vocab_size"]:,} most frequent of {shape["vocab_size"]:,} tokens, {run["coverage"]:.2%} of what the
target writes. {run["parameters"]:,} parameters in BF16.

## Training

By `draft/eagle3/training` on the target's own text: {run["text_prompts"]:,} prompts cut from the target's training
documents, continued by the target, {run["greedy_share"]:.0%} greedily and the others at temperatures from {low} to
{high}; {run["text_tokens"]:,} tokens, of which {run["written_tokens"]:,} are the target's. Training-time test over
{run["steps"]} steps, soft cross-entropy, {run["updates"]:,} updates, {run["seen_tokens"]:,} tokens,
{run["train_seconds"]:.0f} s on {run["device"]}, torch {run["torch"]}.

## Accept lengths

Tokens committed per forward of the target, its own token included (k + 1 is the ceiling), for chains of k guesses on
the target's greedy answers to held-out prompts ({steps:,} verify steps at k = 3). Simulated with the training graph,
which equals inference (largest difference of logits: {report["largest_logit_difference"]:.1e} in float32).

{accept_table(accept)}

Share of guesses that are right at each place of a chain, given that those before are: {places}.
Text from templates flatters a draft; `small_talk` and the prose sources are what people wrote.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--draft", type=Path, default=Path("draft/eagle3/tiny"))
    arguments = parser.parse_args()
    report = json.loads(arguments.report.read_text(encoding="utf-8"))
    (arguments.draft / "README.md").write_text(draft_card(report), encoding="utf-8")


if __name__ == "__main__":
    main()
