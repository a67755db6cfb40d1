"""`cached_tokens` of prompts that begin alike, over the real engine: n answers, many prompts, streams, salts, flush."""

import pytest

from engine.config import EngineConfig
from engine.launch import start_engine
from tests.checkpoints import SMALL, build_checkpoint
from tests.engine.server.harness import serving
from tests.engine.server.load import settle

LONG = "A beginning that fills several blocks of the cache. " * 5
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 3}
EVERY_CHUNK = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
BLOCK = 64


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    model = str(build_checkpoint(tmp_path_factory.mktemp("small"), SMALL))
    core, _ = start_engine(EngineConfig(model, device="cpu", num_threads=1, max_model_len=512))
    with serving(core) as server:
        yield server


@pytest.fixture
def server(running):
    assert running.post("/flush_cache", None).json() == {"status": "flushed"}
    yield running
    settle(running)


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def full_blocks(num_tokens: int) -> int:
    """What of a prompt can be found: full blocks, and never its last token."""
    return (num_tokens - 1) // BLOCK * BLOCK


def test_the_second_time_the_prompt_is_there(server):
    first, second = (server.complete(prompt=LONG, **GREEDY) for _ in range(2))
    expected = full_blocks(first["usage"]["prompt_tokens"])
    assert expected >= 2 * BLOCK and (cached(first), cached(second)) == (0, expected)
    assert first["choices"] == second["choices"]
    server.post("/flush_cache", {})
    assert cached(server.complete(prompt=LONG, **GREEDY)) == 0


def test_n_answers_compute_their_prompt_once(server):
    """A prompt that counts once was not cached if one of its answers had to compute it."""
    assert cached(server.complete(prompt=LONG, n=3, **GREEDY)) == 0
    again = server.complete(prompt=LONG, n=3, **GREEDY)
    assert cached(again) == full_blocks(again["usage"]["prompt_tokens"])


def test_several_prompts_count_each(server):
    both = server.complete(prompt=[LONG + "one", LONG + "two"], **GREEDY)
    again = server.complete(prompt=[LONG + "one", LONG + "two"], **GREEDY)
    length = full_blocks(len(server.core.tokenizer.encode(LONG, allow_special=True)))
    assert cached(both) == length, "the second begins like the first"
    assert 2 * length <= cached(again) < again["usage"]["prompt_tokens"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_tells_from_its_first_chunk_on(server, kind):
    if kind == "chat":
        fields = {"messages": [{"role": "user", "content": LONG}], "n": 2, **GREEDY, **EVERY_CHUNK}
        rounds = [server.chat_chunks(**fields) for _ in range(2)]
    else:
        rounds = [server.completion_chunks(prompt=LONG, n=2, **GREEDY, **EVERY_CHUNK) for _ in range(2)]
    expected = full_blocks(rounds[0][0]["usage"]["prompt_tokens"])
    for chunks, length in zip(rounds, (0, expected), strict=True):
        assert {cached(chunk) for chunk in chunks} == {length}


def test_salts_share_nothing(server):
    answers = [server.complete(prompt=LONG, cache_salt=salt, **GREEDY) for salt in ("a", "b", None, "a")]
    found = [cached(answer) for answer in answers]
    assert found[:3] == [0, 0, 0] and found[3] == full_blocks(answers[3]["usage"]["prompt_tokens"])
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1


def test_a_flush_takes_nothing_from_those_that_run(server):
    alone = server.complete(prompt=LONG, **GREEDY | {"max_tokens": 60})["choices"]
    with server.http() as http:
        body = {"prompt": LONG, "stream": True, **GREEDY, "max_tokens": 60, "return_token_ids": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            text = next(lines)
            server.post("/flush_cache", {})
            text += "".join(lines)
    assert text.endswith("data: [DONE]")
    assert server.complete(prompt=LONG, **GREEDY | {"max_tokens": 60})["choices"] == alone
    blocks = server.core.stats().kv_cache_blocks
    assert blocks["held"] == 0 and blocks["cached"] > 0


def test_load_and_metrics_show_the_same_blocks(server):
    server.complete(prompt=LONG, **GREEDY)
    with server.http() as http:
        load, metrics = http.get("/load").json(), http.get("/metrics").text
    for state, count in load["kv_cache_blocks"].items():
        assert f'turnout_kv_cache_blocks{{state="{state}"}} {count:.1f}' in metrics
    assert load["num_requests_running"] == load["num_requests_waiting"] == load["kv_cache_usage_ratio"] == 0
    assert load["is_draining"] is False and load["kv_cache_blocks"]["cached"] >= 2
