"""guidellm: a short load through both kinds of completion; it always asks for usage in every chunk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from local_tokenizer import write_tokenizer
from steps import Target, run

NUM_REQUESTS = 6


def load(target: Target, route: str) -> dict:
    """The metrics of a run of six requests, two at a time, 64 tokens in and 16 out."""
    directory = target.directory / route.strip("/").replace("/", "_")
    directory.mkdir()
    tokenizer = write_tokenizer(directory / "tokenizer")
    backend = f"kind=openai_http,target={target.url},model={target.model},api_key={target.key},request_format={route}"
    # fmt: off
    command = [
        str(Path(sys.executable).parent / "guidellm"), "run", "--backend", backend,
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--output", f"kind=json,path={directory / 'out.json'}", "--disable-console-interactive",
    ]
    # fmt: on
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=140
    )
    assert done.returncode == 0, done.stdout[-3000:]
    (benchmark,) = json.loads((directory / "out.json").read_text())["benchmarks"]
    return benchmark


def chat(target: Target) -> str:
    """/v1/chat/completions: six requests, two at a time, 16 tokens each with ignore_eos"""
    metrics = load(target, "/v1/chat/completions")["metrics"]
    assert metrics["request_totals"]["successful"] == NUM_REQUESTS, metrics["request_totals"]
    assert metrics["output_token_count"]["successful"]["mean"] == 16, metrics["output_token_count"]
    return "16 tokens an answer by the server's count"


def completions(target: Target) -> None:
    """/v1/completions: the same"""
    metrics = load(target, "/v1/completions")["metrics"]
    assert metrics["request_totals"]["successful"] == NUM_REQUESTS, metrics["request_totals"]
    assert metrics["output_token_count"]["successful"]["mean"] == 16, metrics["output_token_count"]


if __name__ == "__main__":
    run("guidellm", [chat, completions])
