"""aiperf: a short load with the server's own token counts, streamed with usage in every chunk, and text completions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from local_tokenizer import write_tokenizer
from steps import Target, run

PROMPTS = ("What is 17 + 25?", "How are you today?", "Tell me a joke.")
NUM_REQUESTS = 6


def profile(target: Target, kind: str, *options: str) -> dict:
    """What aiperf found, from its summary in JSON."""
    directory = target.directory / f"{kind}{len(options)}"
    directory.mkdir()
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    # fmt: off
    command = [
        str(Path(sys.executable).parent / "aiperf"), "profile", "--model-names", target.model, "--url", target.url,
        "--api-key", target.key, "--endpoint-type", kind, "--streaming", "--ui", "none",
        "--tokenizer", str(write_tokenizer(directory / "tokenizer")), "--use-server-token-count",
        "--input-file", str(directory / "prompts.jsonl"), "--custom-dataset-type", "single_turn",
        "--request-count", str(NUM_REQUESTS), "--concurrency", "2", "--output-artifact-dir", str(directory / "out"),
        "--extra-inputs", "max_tokens:24", *options,
    ]
    # fmt: on
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=130
    )
    assert done.returncode == 0, done.stdout[-3000:]
    (summary,) = (directory / "out").rglob("profile_export_aiperf.json")
    found = json.loads(summary.read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS, found.get("error_summary")
    return found


def chat(target: Target) -> str:
    """chat, streamed, two at a time, usage in every chunk"""
    found = profile(target, "chat", "--per-chunk-usage")
    assert found["output_sequence_length"]["avg"] > 1 and found["time_to_first_token"]["avg"] > 0, found
    return f"{found['output_sequence_length']['avg']:.1f} tokens an answer by the server's count"


def completions(target: Target) -> None:
    """text completions, streamed, two at a time, past the end token"""
    found = profile(target, "completions", "--extra-inputs", "ignore_eos:true")
    assert found["output_sequence_length"]["avg"] == 24, found


if __name__ == "__main__":
    run("aiperf", [chat, completions])
