"""What serve.py refuses, before any weight is read."""

from __future__ import annotations

import socket
import subprocess

import pytest

import serve
from engine import log
from engine.model_runner import ModelRunner
from tests.checkpoints import SMALL, build_checkpoint
from tests.damage import DAMAGES


@pytest.fixture
def nothing_loads(monkeypatch):
    """A setting that cannot work is refused before weights are read and ranks are started."""

    def refuse(*_args, **_settings):
        raise AssertionError("loading began before the settings were checked")

    monkeypatch.setattr(ModelRunner, "__init__", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = log.logger.handlers[:], log.logger.level, log.logger.propagate
    yield
    log.logger.handlers[:], log.logger.level, log.logger.propagate = before


def refusal(capsys, *options: str) -> str:
    """The one line with which serve.py refuses `options`; argparse adds its usage before it, and a server that listens
    already has said where."""
    try:
        code = serve.main([*options])
    except SystemExit as error:
        code = error.code
    assert code == 2
    *usage, line = capsys.readouterr().err.strip().splitlines()
    assert not usage or usage[0].startswith("usage: ") or [" INFO [rank 0] loading; " in one for one in usage] == [True]
    assert line.startswith("serve.py: "), line
    return line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "-1"], ["port", "-1"]),
        (["--port", "70000"], ["port", "70000"]),
        (["--port", "many"], ["--port", "many"]),
        (["--api-key", ""], ["--api-key"]),
        (["--api-key", "good", "--api-key", " "], ["--api-key"]),
        (["--host", "no.such.host.invalid"], ["no.such.host.invalid"]),
        (["--tp", "3"], ["tp=3", "8", "head"]),
        (["--tp", "4", "--ep", "3"], ["ep=3", "tp=4"]),
        (["--tp", "0"], ["tp", "0"]),
        (["--model", "/no/such/model"], ["/no/such/model"]),
        (["--draft", "/no/such/draft"], ["/no/such/draft", "EAGLE-3"]),
        (["--draft", "models/kimi_k25/tiny"], ["models/kimi_k25/tiny", "KimiK25ForConditionalGeneration"]),
        (["--num-draft-tokens", "16"], ["num_draft_tokens", "16", "15"]),
        (["--hf-overrides", "{"], ["--hf-overrides", "JSON"]),
        (["--hf-overrides", "[1]"], ["--hf-overrides", "JSON"]),
        (["--hf-overrides", '{"hidden_size": "wide"}'], ["hidden_size"]),
        (["--moe-comm", "pigeon"], ["pigeon", "allreduce", "nccl_a2a", "reference"]),
        (["--attention-backend", "eyes"], ["eyes", "reference"]),
        (["--device", "abacus"], ["abacus", "cpu", "cuda"]),
        (["--dtype", "int1"], ["int1", "float32", "bfloat16"]),
        (["--load-format", "pickle"], ["pickle", "safetensors"]),
        (["--log-level", "shout"], ["shout", "info"]),
        (["--max-model-len", "10000000"], ["max_model_len", "10000000"]),
        (["--kv-cache-memory-gb", "0.0000001"], ["kv_cache_memory_gb"]),
        (["--kv-cache-memory-gb", "nan"], ["kv_cache_memory_gb"]),
        (["--kv-cache-memory-gb", "1e300"], ["kv_cache_memory_gb"]),
        (["--num-threads", "99999999999"], ["num_threads"]),
        (["--host", "é..é"], ["é..é"]),
        (["--served-model-name", ""], ["--served-model-name"]),
        (["--hf-overrides", "[" * 100_000], ["--hf-overrides", "JSON"]),
        (["--model", "x" * 5000], ["does not exist"]),
        (["--drain-timeout", "-1"], ["--drain-timeout", "-1"]),
        (["--drain-timeout", "soon"], ["--drain-timeout", "soon"]),
        (["--max-queued-requests", "0"], ["max_queued_requests", "0"]),
        (["--queue-timeout", "0"], ["queue_timeout", "0"]),
        (["--no-such-option"], ["--no-such-option"]),
        (["--tool-call-parser", "hermes"], ["--tool-call-parser"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_b054_b158_settings_that_cannot_work_are_refused_before_loading(nothing_loads, capsys, options, words):
    line = refusal(capsys, "--device", "cpu", "--port", "0", *options)
    assert all(word in line for word in words), line


def test_b158_a_port_in_use_is_found_before_loading(nothing_loads, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refusal(capsys, "--port", port)


def test_b158_a_missing_tokenizer_is_found_before_loading(nothing_loads, capsys, tmp_path):
    directory = build_checkpoint(tmp_path, SMALL)
    (directory / "tiktoken.model").unlink()
    assert "tiktoken.model" in refusal(capsys, "--port", "0", "--device", "cpu", "--model", str(directory))


@pytest.mark.parametrize("damage", ["truncated_by_one_byte", "deleted_shard", "wrong_shape"])
def test_b154_a_damaged_checkpoint_ends_the_server_before_it_loads(nothing_loads, capsys, tmp_path, damage):
    directory = build_checkpoint(tmp_path, SMALL, shards=3)
    words = DAMAGES[damage](directory)
    line = refusal(capsys, "--port", "0", "--device", "cpu", "--model", str(directory))
    assert all(word in line for word in words), line


def test_more_ranks_than_gpus(nothing_loads, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    line = refusal(capsys, "--port", "0", "--device", "cuda", "--tp", "4")
    assert "4" in line and "2" in line and "GPU" in line


def test_a_public_address_without_a_key_warns(nothing_loads, capsys):
    options = ["--port", "0", "--host", "0.0.0.0", "--device", "cpu", "--model", "/no/such/model"]
    for key, warns in ([], True), (["--api-key", "a key of mine"], False):
        assert serve.main([*options, *key]) == 2
        err = capsys.readouterr().err
        assert ("--api-key" in err) == warns and "a key of mine" not in err
