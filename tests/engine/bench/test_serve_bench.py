"""`engine.bench serve` from end to end on the tiny model: both arms, both loops, and what the result file says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.bench import serve
from engine.bench.__main__ import main, parser
from engine.bench.serve_options import PRESETS, engine_config, plans_of, points_of
from engine.config import FULL_CONFIG
from tests.shares import config_directory

SMALL = ["--prompt-tokens", "20", "--output-tokens", "4", "--max-model-len", "512"]


def measured(tmp_path: Path, *arguments: str) -> dict:
    file = tmp_path / "result.json"
    assert main(["serve", "--device", "cpu", *arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(config_directory(tmp_path_factory.mktemp("serve") / "model"))


def test_http_against_in_process(tmp_path, capsys, model):
    share = ["--model", model, "--tp-share", "2"]
    result = measured(tmp_path, *share, *SMALL, "--clients", "1,3", "--rounds", "2")
    assert [(r["load"], r["arm"]) for r in result["rows"]] == [
        (load, arm) for load in ("http, 1 client", "http, 3 clients") for arm in ("in-process", "http")
    ]
    assert [r["requests"] for r in result["rows"]] == [1, 1, 3, 3]
    assert all(r["errors"] == r["429"] == 0 and r["tok/s"] > 0 and r["TTFT p50"] > 0 for r in result["rows"])
    for point, ratio in zip(("http, 1 client", "http, 3 clients"), result["http_over_in_process"], strict=True):
        inside, http = ([f["tok/s"] for f in s["rounds"]] for s in result["samples"] if s["load"] == point)
        ratios = sorted(b / a for a, b in zip(inside, http, strict=True))
        assert ratio["HTTP / in process"] == pytest.approx(sum(ratios) / 2)
        assert (ratio["lowest"], ratio["highest"]) == pytest.approx((ratios[0], ratios[1]))
    assert result["http_over_in_process"][0]["goal"] == 0.98 and result["http_over_in_process"][1]["goal"] is None
    assert all(f["output_tokens"] == 4 * f["requests"] for s in result["samples"] for f in s["rounds"])
    assert "HTTP / in process" in capsys.readouterr().out and "Protocol" in result["http"]


def test_agents_in_an_open_loop(tmp_path):
    arguments = ["--trace", "agents", "--rate", "50", "--requests", "2", "--turns", "3", "--think", "0.01"]
    arguments += ["--scale", "0.002", "--rounds", "1", "--max-model-len", "512"]
    result = measured(tmp_path, *arguments)
    inside, http = result["rows"]
    assert inside["load"] == "http, 50/s" and inside["requests"] == http["requests"] >= 6
    assert inside["errors"] == http["errors"] == 0
    tokens = [s["rounds"][0]["output_tokens"] for s in result["samples"]]
    prompts = [s["rounds"][0]["prompt_tokens"] for s in result["samples"]]
    assert tokens[0] == tokens[1] and prompts[0] == prompts[1], "both arms answered the same turns"


def test_a_made_up_share_serves_too(tmp_path, model):
    share = ["--model", model, "--tp-share", "2", "--layers", "2", "--clients", "2", "--rounds", "1", "--host-cost"]
    result = measured(tmp_path, *share, "--prompt-tokens", "20", "--output-tokens", "4", "--max-model-len", "230")
    assert [row["requests"] for row in result["host"]] == [2] and result["host"][0]["schedule"] > 0
    assert result["world"] == {"tp": 2, "ep": 1} and result["layers"] == 2
    assert [r["errors"] for r in result["rows"]] == [0, 0]


def test_presets_are_whole_and_what_is_given_holds_for_all():
    args = parser().parse_args(["serve", "--preset", ",".join(PRESETS), "--rounds", "7"])
    plans = plans_of(args, has_gpu=True)
    assert [plan.preset for plan in plans] == list(PRESETS) and {plan.rounds for plan in plans} == {7}
    for plan in plans:
        assert plan.prompt_tokens >= 1024 and points_of(plan) and plan.ttft_limit_ms > 0
        assert all(getattr(plan, name) is not None for name in PRESETS[plan.preset])
    http, prefix, _ = plans
    assert (http.trace, prefix.trace, prefix.prompt_tokens) == ("fixed", "shared-prefix", 8192)


def test_presets_run_one_after_the_other_on_one_engine(tmp_path, model):
    share = ["--model", model, "--tp-share", "2", "--clients", "1", "--waves", "3", "--rounds", "1"]
    lengths = ["--prompt-tokens", "200", "--output-tokens", "2", "--max-model-len", "256"]
    result = measured(tmp_path, *share, *lengths, "--preset", "http,prefix")
    http, http_too, cached, uncached = result["rows"]
    assert [http["load"], cached["load"]] == ["http, 1 client", "prefix, 1 client"]
    assert (http["cached"], http_too["cached"], uncached["cached"]) == (0, 0, 0)
    assert cached["cached"] == pytest.approx(2 * 128 / 600), "two requests find the first one's full blocks"
    assert result["prefix_cache"][0]["times lower"] > 0 and set(result["settings"]) == {"http", "prefix"}


def test_the_arm_without_a_prefix_cache_has_an_engine_without_one(monkeypatch):
    made = []
    monkeypatch.setattr(serve, "EngineCore", lambda config, files, runner: made.append(config.enable_prefix_caching))
    from engine.config import EngineConfig

    engine = serve.Engine(EngineConfig(), None, None)
    for arm in ("in-process", "in-process-uncached", "http-uncached"):
        engine.core(arm)
    assert made == [True, False, False]


def test_real_ranks_hold_as_much_of_the_full_model_as_was_asked_for():
    words = ["--model", str(FULL_CONFIG), "--tp", "2", "--ep", "2", "--moe-comm", "symm_scatter", "--experts", "128"]
    config = engine_config(plans_of(parser().parse_args(["serve", "--device", "cpu", *words]), has_gpu=False)[0])
    assert (config.tp, config.ep, config.tp_share, config.moe_comm) == (2, 2, None, "symm_scatter")
    assert config.load_format == "dummy" and config.hf_overrides == {"n_routed_experts": 128}


def test_ranks_that_follow_keep_one_core_whose_cache_is_emptied():
    flushed = []
    leading = SimpleNamespace(flush_prefix_cache=lambda: flushed.append(1))
    engine = serve.Engine(None, None, None, leading)
    assert [engine.core(arm) for arm in ("in-process", "http")] == [leading] * 2 and len(flushed) == 2


@pytest.mark.slow
def test_http_against_in_process_on_two_ranks(tmp_path):
    result = measured(tmp_path, "--tp", "2", "--ep", "2", *SMALL, "--clients", "1,3", "--rounds", "2")
    assert result["world"] == {"tp": 2, "ep": 2} and [r["errors"] for r in result["rows"]] == [0] * 4
    assert [r["cached"] for r in result["rows"]] == [0] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arms", "smoke"], "--arms 'smoke'"),
        (["--clients", "0"], "--clients"),
        (["--rate", "x"], "--rate"),
        (["--rounds", "0"], "--rounds"),
        (["--share", "1.5"], "--share"),
        (["--requests", "0"], "--requests"),
        (["--scale", "0"], "--scale"),
        (["--layers", "2"], "--layers"),
        (["--experts", "2"], "--experts"),
        (["--tp", "2", "--tp-share", "2"], "--tp above 1"),
        (["--tp", "2", "--host-cost"], "--tp above 1"),
        (["--tp", "2", "--arms", "http-uncached"], "--tp above 1"),
        (["--think", "-1"], "--think"),
        (["--preset", "http,x"], "--preset 'x'"),
    ],
)
def test_a_setting_that_cannot_be_measured_is_refused(capsys, arguments, words):
    assert main(["serve", "--device", "cpu", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("load", [["--prompt-tokens", "500"], ["--trace", "agents", "--scale", "1"]])
def test_requests_that_do_not_fit_are_refused(capsys, model, load):
    share = ["--model", model, "--tp-share", "2", "--max-model-len", "256", "--clients", "1"]
    assert main(["serve", "--device", "cpu", *share, *load]) == 2
    assert "longer than the engine's 256 tokens" in capsys.readouterr().err
