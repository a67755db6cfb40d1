"""GET /metrics: names, types and values, read back with Prometheus' own parser, over the real core."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import threading

import pytest
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from engine.acceptance import GuessOutcome
from engine.comm.meter import KINDS
from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.launch import start_engine
from engine.server.client import EngineClient
from engine.stats import DraftChoiceStats, SpeculationStats
from tests.engine.server.harness import HI, error_of, make_core, request_bytes, serving
from tests.processes import until

NAMES = {
    "counter": """
        steps_total prompt_tokens_total generation_tokens_total num_preemptions_total request_finished_total
        request_rejected_total prefix_cache_query_tokens_total prefix_cache_hit_tokens_total
        kv_offload_restored_blocks_total comm_rounds_total comm_bytes_total tool_call_parse_errors_total
    """,
    "gauge": """
        num_requests_running num_requests_waiting kv_cache_usage_ratio kv_cache_blocks kv_offload_blocks
        moe_rank_imbalance_ratio moe_comm_info
    """,
    "histogram": """
        time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds request_queue_time_seconds
        request_prefill_time_seconds request_decode_time_seconds iteration_tokens_total
    """,
    "spec": """
        verify_steps_total num_drafts_total num_proposed_tokens_total num_draft_tokens_total num_accepted_tokens_total
        num_accepted_tokens_per_pos_total accept_length choice_info step_seconds
    """,
}
COUNTERS, GAUGES, HISTOGRAMS, SPECULATION = (
    {f"turnout_{'spec_decode_' if kind == 'spec' else ''}{name}" for name in names.split()}
    for kind, names in NAMES.items()
)
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def families(server) -> dict:
    with server.http() as http:
        response = http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"] == CONTENT_TYPE_LATEST
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def with_family(server, name: str) -> dict | None:
    found = families(server)
    return found if name in found else None


def values(server) -> dict[tuple[str, tuple], float]:
    """(name, labels) -> value of every sample; none comes twice."""
    samples = [sample for family in families(server).values() for sample in family.samples]
    found = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}
    assert len(found) == len(samples)
    return found


def growth(before: dict, after: dict, name: str, **labels: str) -> float:
    key = (name, tuple(sorted(labels.items())))
    return after[key] - before.get(key, 0.0)


@pytest.fixture(scope="module")
def server():
    core, _ = start_engine(EngineConfig(device="cpu", num_threads=1, max_model_len=256))
    with serving(core) as running:
        yield running


def test_names_and_types(server):
    """Exactly these: dashboards rest on them."""
    server.chat(max_tokens=2)
    found = until(lambda: with_family(server, "turnout_moe_rank_imbalance_ratio"), 20, "the load was read since")
    names = {
        SUFFIX.sub("", sample.name) if family.type == "histogram" else sample.name: family.type
        for family in found.values()
        for sample in family.samples
    }
    for kind, expected in (("counter", COUNTERS), ("gauge", GAUGES), ("histogram", HISTOGRAMS)):
        assert {name for name, shown in names.items() if shown == kind} == expected
    assert all(family.documentation and name.startswith("turnout_") for name, family in found.items())
    for name in ("turnout_comm_rounds", "turnout_comm_bytes"):
        assert {sample.labels["kind"] for sample in found[name].samples} == set(KINDS)
    assert "turnout_comm_seconds" not in found, "one rank waits for nobody"
    chosen = [sample.labels for family in found.values() for sample in family.samples if "moe_comm" in sample.name]
    assert chosen and {labels["dispatcher"] for labels in chosen} == {"reference"}
    assert not any("microseconds" in labels for labels in chosen), "nothing was measured"


def test_counts_of_an_answer(server):
    before = values(server)
    answer = server.chat(temperature=0, max_tokens=5, ignore_eos=True)
    after = values(server)
    usage = answer["usage"]
    assert growth(before, after, "turnout_prompt_tokens_total") == usage["prompt_tokens"]
    assert growth(before, after, "turnout_generation_tokens_total") == usage["completion_tokens"] == 5
    assert growth(before, after, "turnout_steps_total") == 5, "one for the prompt and its token, one each for the rest"
    name = "turnout_iteration_tokens_total"
    assert growth(before, after, f"{name}_count") == 5
    assert growth(before, after, f"{name}_sum") == usage["prompt_tokens"] + 4
    assert growth(before, after, "turnout_request_finished_total", reason="length") == 1
    assert growth(before, after, "turnout_time_to_first_token_seconds_count") == 1
    assert growth(before, after, "turnout_inter_token_latency_seconds_count") == 4
    assert growth(before, after, "turnout_e2e_request_latency_seconds_count") == 1
    whole = growth(before, after, "turnout_e2e_request_latency_seconds_sum")
    parts = ("turnout_time_to_first_token_seconds_sum", "turnout_inter_token_latency_seconds_sum")
    assert whole == pytest.approx(sum(growth(before, after, part) for part in parts)) and whole > 0
    layers = server.core.replica.runner.model_config.num_hidden_layers
    assert growth(before, after, "turnout_comm_rounds_total", kind="attention_reduce") == 5 * layers
    assert growth(before, after, "turnout_comm_bytes_total", kind="attention_reduce") == 0
    assert after["turnout_num_requests_running", ()] == after["turnout_kv_cache_usage_ratio", ()] == 0


def test_nothing_is_counted_before_the_first_step():
    core, _ = start_engine(EngineConfig(device="cpu", num_threads=1, max_model_len=64))
    stats = core.stats()
    assert stats.num_steps == sum(stats.comm_rounds.values()) == 0
    core.shutdown()


def test_gauges_while_requests_run_and_counters_never_fall(server):
    seen = [values(server)]
    calls = [
        threading.Thread(target=server.chat, kwargs={"temperature": 0, "max_tokens": 60, "ignore_eos": True, "n": 2})
        for _ in range(2)
    ]
    for call in calls:
        call.start()
    while any(call.is_alive() for call in calls):
        seen.append(values(server))
    seen.append(values(server))
    running = [found["turnout_num_requests_running", ()] for found in seen]
    assert max(running) in (2, 4) and running[-1] == 0
    assert max(found["turnout_kv_cache_usage_ratio", ()] for found in seen) > 0
    for earlier, later in itertools.pairwise(seen):
        for (name, labels), value in earlier.items():
            assert name in GAUGES or name == "turnout_kv_cache_blocks" or later[name, labels] >= value, name


def test_answers_by_reason_aborts_too(server):
    """B167: ten requests, five of which hang up."""
    before = values(server)
    fields = {"messages": HI, "temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": 200}
    for _ in range(5):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(request_bytes("/v1/chat/completions", fields))
        assert connection.recv(100)
        connection.close()
    for _ in range(4):
        server.chat(temperature=0, max_tokens=2, ignore_eos=True)
    first = server.complete(max_tokens=1, temperature=0, return_token_ids=True)["choices"][0]["token_ids"]
    stop = server.core.tokenizer.decode(first)
    server.complete(temperature=0, max_tokens=50, stop=[stop])
    until(lambda: not server.core.has_unfinished(), 20, "nothing runs")
    after = values(server)
    assert growth(before, after, "turnout_request_finished_total", reason="abort") == 5
    assert growth(before, after, "turnout_request_finished_total", reason="stop") == 1
    assert growth(before, after, "turnout_request_finished_total", reason="length") == 5
    assert growth(before, after, "turnout_e2e_request_latency_seconds_count") == 6


def test_what_was_measured_at_start_is_shown():
    core = make_core()
    core.comm_choice = {
        "microseconds": {1: {"allreduce": 24.0, "symm_replicated": 13.5}, 64: {"allreduce": 36.0}},
        "chosen": {1: "symm_replicated", 64: "allreduce"},
    }
    with serving(core) as running:
        found = values(running)
    name = "turnout_moe_comm_info"
    chosen = {dict(labels)["rows"]: dict(labels) for (n, labels) in found if n == name}
    assert chosen == {
        "1": {"rows": "1", "dispatcher": "symm_replicated", "microseconds": "13.50"},
        "64": {"rows": "64", "dispatcher": "allreduce", "microseconds": "36.00"},
    }
    times = {labels: value for (n, labels), value in found.items() if n == "turnout_moe_comm_microseconds"}
    assert times[("dispatcher", "allreduce"), ("rows", "1")] == 24.0 and len(times) == 3


def test_speculation_is_shown_where_there_is_a_draft():
    counts = SpeculationStats(3)
    for accepted in (3, 0, 2):
        counts.observe(1, 3, 3, [GuessOutcome("a", 3, accepted, 3, accepted)])
    choices = {
        1: DraftChoiceStats(3, "gain", "k=3: 2.41 tokens in 1.62 plain steps"),
        8: DraftChoiceStats(0, "plain", "plain: k=1 would give 0.93x"),
    }
    core = make_core()
    with serving(core) as running:
        assert not any("spec_decode" in name for name in families(running)), "no draft"
        core.speculation = counts.snapshot(choices, {1: {0: 0.01, 3: 0.0162}})
        found = families(running)
        samples = values(running)
    prefix = "turnout_spec_decode_"
    shown = {SUFFIX.sub("", name) for name, _ in samples if name.startswith(prefix)}
    assert shown == SPECULATION, "dashboards rest on the names"
    assert samples[f"{prefix}verify_steps_total", ()] == samples[f"{prefix}num_drafts_total", ()] == 3
    assert samples[f"{prefix}num_proposed_tokens_total", ()] == samples[f"{prefix}num_draft_tokens_total", ()] == 9
    assert samples[f"{prefix}num_accepted_tokens_total", ()] == 5
    name = f"{prefix}num_accepted_tokens_per_pos_total"
    assert [samples[name, (("position", str(i)),)] for i in range(3)] == [2, 2, 1]
    name = f"{prefix}accept_length"
    lengths = [samples[f"{name}_bucket", (("le", le),)] for le in ("1.0", "2.0", "3.0", "4.0", "+Inf")]
    assert lengths == [1, 1, 2, 3, 3] and samples[f"{name}_sum", ()] == 8 and samples[f"{name}_count", ()] == 3
    shown = [sample.labels for sample in found[f"{prefix}choice_info"].samples]
    assert shown == [
        {"bucket": "1", "num_drafts": "3", "reason": "gain"},
        {"bucket": "8", "num_drafts": "0", "reason": "plain"},
    ]
    assert samples[f"{prefix}step_seconds", (("bucket", "1"), ("num_drafts", "3"))] == 0.0162


def test_a_key_is_asked_for_and_only_get_is_served():
    with serving(api_keys=["k"]) as server, server.http() as http:
        assert error_of(http.get("/metrics"), 401)["code"] == "invalid_api_key"
        assert http.get("/metrics", headers={"authorization": "Bearer k"}).status_code == 200
        error_of(http.post("/metrics", headers={"authorization": "Bearer k"}), 405)


def test_the_core_is_read_in_its_own_thread(server):
    core = make_core()
    with serving(core) as running:
        values(running)
        assert core.threads == {running.client._thread.ident}


def test_a_dead_engine_answers_503():
    core = make_core()
    with serving(core) as running, running.http() as http:
        core.lose_a_rank()
        running.client._thread.join(10)
        assert error_of(http.get("/metrics"), 503)["code"] == "engine_dead"


def test_questions_fail_with_the_engine_and_alone():
    """A question that raises is its asker's affair; one that waits when the engine ends is answered too."""
    core = make_core(gate=threading.Semaphore(0))
    client = EngineClient(core)

    async def ask_all() -> list:
        def fail(_core):
            raise ValueError("no such thing")

        started = asyncio.Event()
        loop = asyncio.get_running_loop()
        release = threading.Event()

        def hold(_core):
            loop.call_soon_threadsafe(started.set)
            return release.wait(10)

        first = await asyncio.gather(client.ask(lambda c: c.model_name), client.ask(fail), return_exceptions=True)
        held = asyncio.ensure_future(client.ask(hold))
        await started.wait()
        late = asyncio.ensure_future(client.ask(lambda c: c.model_name))
        await asyncio.sleep(0)
        core.lose_a_rank()
        release.set()
        return [*first, *await asyncio.gather(held, late, return_exceptions=True)]

    name, refusal, held, late = asyncio.run(ask_all())
    assert name == "tiny" and isinstance(refusal, ValueError) and held is True
    assert isinstance(late, EngineDeadError)
    client.close()
    with pytest.raises(EngineDeadError):
        asyncio.run(client.ask(lambda c: c.model_name))
