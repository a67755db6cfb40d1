"""Tokens routed to each expert: counted on the device, each token once, on any ranks; and what that says of ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from engine.comm.dispatcher import DISPATCHERS
from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import InvalidRequestError
from engine.expert_load import ExpertLoad
from engine.expert_map import ExpertMap
from engine.sampling_params import SamplingParams
from engine.server import responses
from tests.answers import ask
from tests.checkpoints import SMALL, build_checkpoint, scaled
from tests.engine.server.harness import check, error_of, serving
from tests.processes import PYTHON, TORCHRUN, running
from tests.rank_cores import build_core, run_ranks
from tests.rerun import record

SHAPE = scaled(SMALL, num_hidden_layers=3)
REQUESTS = [(list(range(7 * n, 7 * n + 5 + 9 * n)), 3 + n) for n in range(3)]
NUM_TOKENS = sum(len(prompt) + length - 1 for prompt, length in REQUESTS)
TP = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("load"), SHAPE)


def build(directory: Path, rank: int = 0, **settings) -> EngineCore:
    settings = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4} | settings
    config = EngineConfig(str(directory), device="cpu", dtype="float32", num_threads=1, **settings)
    return build_core(config, rank)


def work(core: EngineCore) -> None:
    """Prompts in chunks beside decodes, more rows than one step takes."""
    ask(core, *[(p, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)) for p, n in REQUESTS])


def counts_of(core: EngineCore) -> torch.Tensor:
    return torch.tensor(core.expert_load().layers)


@pytest.fixture(scope="module")
def one_rank(checkpoint) -> ExpertLoad:
    core = build(checkpoint)
    work(core)
    return core.expert_load()


def test_shares_and_imbalance():
    """Two groups of two ranks; in the second layer all tokens go to one expert, which a map puts in the last slot."""
    placed = ExpertMap({4: (2, 3, 1, 0)})
    load = ExpertLoad.of([[3, 1, 2, 2], [0, 0, 0, 8]], 3, 2, placed, ParallelState(tp=4, ep=2))
    assert load.layers == [[3, 1, 2, 2], [8, 0, 0, 0]] and load.first_moe_layer == 3 and load.num_tokens == 4
    assert load.ranks == [[0.25] * 4, [0.0, 0.0, 0.5, 0.5]]
    assert load.rank_imbalance_ratio == pytest.approx((1.0 + 2.0) / 2)


def test_before_the_first_token_nothing_is_uneven(checkpoint):
    """Also that dry runs and whatever prepares an engine leave nothing."""
    load = build(checkpoint).expert_load()
    assert load.rank_imbalance_ratio is None and load.num_tokens == 0 and load.ranks == [[0.0]] * 2
    assert load.layers == [[0] * SHAPE.n_routed_experts] * 2
    no_layers = ExpertLoad.of([], 2, 2, ExpertMap(), ParallelState())
    assert (no_layers.layers, no_layers.num_tokens, no_layers.rank_imbalance_ratio) == ([], 0, None)


def test_counts_are_the_routers_choices(checkpoint):
    core = build(checkpoint)
    kernels = core.replica.runner.model.kernels
    routers = [layer.feed_forward.router for layer in core.replica.runner.model.layers[1:]]
    seen = torch.zeros(2, SHAPE.n_routed_experts, dtype=torch.int64)
    inner = kernels.route

    def route(x_TD, weight, *rest):
        routing = inner(x_TD, weight, *rest)
        layer = next(i for i, router in enumerate(routers) if router.first.weight is weight)
        seen[layer] += routing.ids_TK[routing.ids_TK >= 0].bincount(minlength=SHAPE.n_routed_experts)
        return routing

    kernels.route = route
    work(core)
    load = core.expert_load()
    assert load.layers == seen.tolist() and load.num_tokens == NUM_TOKENS and load.first_moe_layer == 1
    assert (seen.sum(1) == NUM_TOKENS * SHAPE.num_experts_per_tok).all()
    assert load.ranks == [[1.0]] * 2 and load.rank_imbalance_ratio == 1.0


def test_replayed_steps_count_the_same_without_their_padding(checkpoint, one_rank):
    core = build(checkpoint)
    recorder = record(core.replica.runner)
    before = counts_of(core)
    work(core)
    assert sum(graph.num_replays for graph in recorder.graphs) > 0
    assert (counts_of(core) - before).tolist() == one_rank.layers


def load_of_all(rank: int, directory: str, ep: int) -> dict[str, dict]:
    found = {}
    for name in DISPATCHERS:
        try:
            core = build(Path(directory), rank, tp=TP, ep=ep, moe_comm=name)
        except ValueError:
            continue
        work(core)
        rounds = core.stats().comm_rounds
        found[name] = asdict(core.expert_load())
        assert core.stats().comm_rounds == rounds, "reading is no part of a step"
    return found


@pytest.mark.parametrize("ep", [1, 2])
def test_each_token_counts_once_on_any_ranks(checkpoint, one_rank, tmp_path, ep):
    for found in run_ranks(TP, tmp_path, load_of_all, str(checkpoint), ep):
        assert set(found) >= {"reference", "allreduce", "nccl_a2a"}
        for name, load in found.items():
            assert (load["layers"], load["num_tokens"]) == (one_rank.layers, NUM_TOKENS), name
            half = SHAPE.n_routed_experts // 2
            expected = [[0.5, 0.5] if ep == 1 else [sum(r[:half]) / sum(r), sum(r[half:]) / sum(r)]
                        for r in one_rank.layers]  # fmt: skip
            assert load["ranks"] == [pytest.approx(shares) for shares in expected], name
            ratio = sum(2 * max(shares) for shares in expected) / len(expected)
            assert load["rank_imbalance_ratio"] == pytest.approx(ratio), name


def test_the_device_is_read_no_more_often_than_asked_for(checkpoint):
    core = build(checkpoint)
    runner, reads = core.replica.runner, []
    inner = runner.expert_counts
    runner.expert_counts = lambda: reads.append(1) or inner()
    first = core.expert_load(1000.0)
    work(core)
    assert core.expert_load(1000.0) is first and len(reads) == 1
    assert core.expert_load().num_tokens == NUM_TOKENS and len(reads) == 2


def test_over_http_and_in_metrics(checkpoint):
    core = build(checkpoint)
    with serving(core) as server, server.http() as http:
        server.complete(prompt=[1, 2, 3], max_tokens=4, ignore_eos=True)
        load = check(responses.ExpertLoad, http.get("/expert_load").json())
        assert load["num_tokens"] == 6 and sum(load["layers"][0]) == 6 * SHAPE.num_experts_per_tok
        lines = http.get("/metrics").text.splitlines()
        assert "turnout_moe_rank_imbalance_ratio 1.0" in lines and load["rank_imbalance_ratio"] == 1.0
        error_of(http.post("/expert_load"), 405)


def test_switched_off(checkpoint):
    core = build(checkpoint, expert_load=False)
    assert core.replica.runner.model.expert_counts is None
    work(core)
    with pytest.raises(InvalidRequestError, match="expert_load"):
        core.expert_load()
    with serving(core) as server, server.http() as http:
        assert "--no-expert-load" in error_of(http.get("/expert_load"), 404)["message"]
        assert "moe_rank_imbalance" not in http.get("/metrics").text


SCRIPT = """
import json, os, sys
from dataclasses import asdict
from engine import LLM, SamplingParams
llm = LLM(**json.loads(sys.argv[1]))
llm.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
first = asdict(llm.expert_load())
llm.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
again = asdict(llm.expert_load())
os.write(1, ("LOADS " + json.dumps([first, again]) + "\\n").encode())
"""


LAUNCHERS = {"plain": PYTHON, "torchrun": [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_in_process_with_rows_of_their_own_on_each_rank(checkpoint, tmp_path, launcher):
    """The other ranks take part without a step; under torchrun each gets rank 0's answer."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    settings = {"model": str(checkpoint), "device": "cpu", "num_threads": 1, "tp": 2, "ep": 2, "moe_comm": "nccl_a2a"}
    with running([*LAUNCHERS[launcher], str(script), json.dumps(settings)], tmp_path) as program:
        assert program.process.wait(120) == 0, program.output
        said = [json.loads(x.removeprefix("LOADS ")) for x in program.output.splitlines() if x.startswith("LOADS ")]
    assert len(said) == (2 if launcher == "torchrun" else 1) and all(pair == said[0] for pair in said)
    first, again = said[0]
    assert (first["num_tokens"], again["num_tokens"]) == (6, 12)
    assert torch.equal(2 * torch.tensor(first["layers"]), torch.tensor(again["layers"]))
