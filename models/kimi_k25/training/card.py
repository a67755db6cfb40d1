"""Writes the model card of the tiny checkpoint from the report of its training run.

python -m models.kimi_k25.training.card --report OUT/report.json --checkpoint models/kimi_k25/tiny
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

TEXTS = Path(__file__).parent / "README.md"


def licence_table(readme: str) -> str:
    """The table of texts and licences in the training README, so that card and README cannot differ."""
    match = re.search(r"<!-- texts -->\n(.*?)\n<!-- /texts -->", readme, re.DOTALL)
    if match is None:
        raise ValueError(f"{TEXTS} has lost its table of texts.")
    return match.group(1)


def loss_table(report: dict) -> str:
    plain, int4 = report["held_out_loss_bf16"], report["held_out_loss_int4"]
    lines = ["| held-out text | BF16 | INT4 experts |", "|---|---|---|"]
    lines += [f"| {source} | {plain[source]:.3f} | {int4[source]:.3f} |" for source in plain]
    return "\n".join(lines)


def sample_section(answers: list[dict]) -> str:
    parts = []
    for answer in answers:
        mode = "thinking" if answer["thinking"] else "instant"
        shown = answer["answer"].replace("```", "'''")
        if not answer["ended"]:
            shown += " [cut]"
        tools = f" (tools: {', '.join(answer['tools'])})" if answer["tools"] else ""
        parts.append(f"**{answer['question']}**{tools}, {mode}:\n```\n{shown}\n```")
    return "\n\n".join(parts)


def tool_section(report: dict) -> str:
    lines = ["| mode | right name | right name and arguments |", "|---|---|---|"]
    lines += [f"| {mode} | {s['name']:.1%} | {s['call']:.1%} |" for mode, s in report["tool_accuracy"].items()]
    return "\n".join(lines)


def model_card(report: dict, readme: str) -> str:
    run = report["training"]
    rules = "\n".join(f"- {name}: {'holds' if ok else '**fails**'}" for name, ok in report["acceptance"].items())
    return f"""---
license: apache-2.0
language: en
---
# kimi-k25-tiny

A very small model with the architecture and the file layout of Kimi-K2.5, made to try, test and show Turnout without a
GPU. Width 256, 5 layers (the first dense), 8 heads with the full model's head sizes and latent ranks, 32 experts of
which 4 and a shared one run, vocabulary 4,096. 24 million parameters; routed experts in packed INT4, all else BF16.

It is not related to Moonshot AI's weights: it was trained from nothing with `models/kimi_k25/training`.

## Training

{run["steps"]:,} steps, {run["tokens"] / 1e6:.0f} million tokens ({run["epochs"]} epochs) in
{run["wall_seconds"]:.0f} s on {run["device"]}, torch {run["torch"]}. AdamW, peak learning rate
{run["settings"]["learning_rate"]}, falling linearly to zero; routed experts are trained as INT4 for the last 20 % and
answers alone for the last 15 %. No teacher model was used, since one that could teach does not fit the time and the
size: small talk, sums, stories, JSON and tool calls come from templates written for this project.

## Held-out loss (nats a token)

{loss_table(report)}

"answers" counts only what the model itself writes. Template sources are held out by seed and share their forms with the
training text, so their loss is low by nature. The tokenizer gives about 3.4 bytes a token.

## Acceptance

{rules}

## Calls of unseen tools

{report["tool_questions"]} requests for invented tools whose names the training text does not hold, answered greedily; a
call counts if it is the only one and is exactly right.

{tool_section(report)}

## What it can and cannot do

It holds small talk, tells templated stories, works out small sums, fills in JSON, names capitals and calls tools that
are declared to it, with thinking (the default) and without. It knows very little: facts outside its text are made up,
country facts are of 2015, long sums and long conversations go wrong, and it speaks English only. Do not rely on
anything that it says.

## Greedy answers to the fixed questions

{sample_section(report["answers"])}

## Texts and licences

{licence_table(readme)}

The weights are published under Apache-2.0 like the rest of the project.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, default=Path("models/kimi_k25/tiny"))
    arguments = parser.parse_args()
    report = json.loads(arguments.report.read_text(encoding="utf-8"))
    card = model_card(report, TEXTS.read_text(encoding="utf-8"))
    (arguments.checkpoint / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
