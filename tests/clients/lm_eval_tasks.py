"""lm-eval: a multiple choice task through local-completions, a generation task through local-chat-completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from steps import Target, run

CHOICES = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GENERATION = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["User:"], max_gen_toks: 100, temperature: 0, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CITIES = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid"}
SUMS = ((17, 25), (3, 4), (12, 30), (50, 8))


def write_task(directory: Path, name: str, text: str, documents: list[dict]) -> None:
    directory.mkdir(exist_ok=True)
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    (directory / f"{name}.yaml").write_text(text.format(file=data))


def evaluate(target: Target, model: str, route: str, task: str, *options: str, **arguments: object) -> dict:
    output = target.directory / f"{model}-{len(list(target.directory.iterdir()))}"
    given = {"base_url": f"{target.base}/{route}", "model": target.model, "max_retries": 1} | arguments
    # fmt: off
    command = [
        str(Path(sys.executable).parent / "lm-eval"), "run", "--model", model, "--tasks", task,
        "--model_args", ",".join(f"{name}={value}" for name, value in given.items()),
        "--include_path", str(target.directory / "tasks"), "--output_path", str(output), *options,
    ]
    # fmt: on
    done = subprocess.run(
        command,
        env=os.environ | {"OPENAI_API_KEY": target.key, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stdout[-2500:]
    (results,) = output.rglob("results_*.json")
    return json.loads(results.read_text())["results"][task]


def capitals(target: Target) -> None:
    wrong = list(CITIES.values())
    documents = [
        {"question": f"The capital of {country} is", "choices": wrong, "answer": i} for i, country in enumerate(CITIES)
    ]
    write_task(target.directory / "tasks", "capitals", CHOICES, documents)


def loglikelihood(target: Target) -> str:
    """local-completions, loglikelihood over token ids: the server's own tokenizer found at /tokenizer_info"""
    capitals(target)
    found = evaluate(target, "local-completions", "completions", "capitals", auth_token=target.key)
    assert found["acc,none"] == 1, found
    return f"acc {found['acc,none']}"


def batched(target: Target) -> str:
    """the same in batches of four prompts, two requests at once: the same accuracy"""
    capitals(target)
    more = {"auth_token": target.key, "num_concurrent": 2}
    found = evaluate(target, "local-completions", "completions", "capitals", "--batch_size", "4", **more)
    assert found["acc,none"] == 1, found
    return f"acc {found['acc,none']}"


def generation(target: Target) -> str:
    """local-chat-completions, generate_until with the chat template: exact match of greedy answers"""
    documents = [{"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}."} for a, b in SUMS]
    write_task(target.directory / "tasks", "sums", GENERATION, documents)
    options = ("--apply_chat_template",)
    found = evaluate(target, "local-chat-completions", "chat/completions", "sums", *options, num_concurrent=2)
    assert found["exact_match,none"] >= 0.75, found
    return f"exact_match {found['exact_match,none']}"


if __name__ == "__main__":
    run("lm_eval", [loglikelihood, batched, generation])
