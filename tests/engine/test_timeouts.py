"""Answers that wait or take too long end by rank 0's clock alone; the ranks hear of it as of any other end."""

from types import SimpleNamespace

import pytest

import engine.core
import engine.output_processor
from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.launch import start_engine
from tests.checkpoints import SMALL, build_checkpoint

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in (engine.core, engine.output_processor):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict:
    model = str(build_checkpoint(tmp_path_factory.mktemp("small"), SMALL))
    return {"model": model, "device": "cpu", "num_threads": 1, "max_num_seqs": 1, "max_model_len": 256}


@pytest.fixture
def core(settings, clock):
    core = start_engine(EngineConfig(**settings, queue_timeout=2.0, request_timeout=10.0))[0]
    core.finishes = []
    apply = core.replica.apply
    core.replica.apply = lambda new, finish: (core.finishes.extend(finish), apply(new, finish))
    return core


def ends(deltas) -> list[tuple[str, int, str | None, object]]:
    return [(d.request_id, d.index, d.finish_reason, d.stop_reason) for d in deltas if d.finish_reason]


def test_who_waits_too_long_and_who_takes_too_long(core, clock):
    core.add_request("a", [1, 2, 3], LONG)
    assert core.num_free_seats == core.num_seats == 1, "it has not begun"
    core.step()
    core.add_request("b", [1, 2, 3], SamplingParams(n=2))
    assert (core.num_begun, core.num_unbegun, core.num_free_seats) == (1, 2, 0)
    assert not ends(core.step())
    clock.now = 2.0
    assert ends(core.step()) == [("b", i, "timeout", "queue_timeout") for i in range(2)]
    assert core.finishes == [["b#0", "timeout", None], ["b#1", "timeout", None]]
    assert (core.num_begun, core.num_unbegun) == (1, 0)
    clock.now = 9.9
    assert not ends(core.step())
    clock.now = 10.0
    assert ends(core.step()) == [("a", 0, "timeout", "request_timeout")]
    assert core.finishes[2:] == [["a", "timeout", None]]
    stats = core.stats()
    assert stats.num_finished["timeout"] == 3 and stats.kv_cache_usage == 0.0 and not core.has_unfinished()
    assert stats.queue_time.counts[0] == 1 and sum(stats.e2e_latency.counts) == 3


def test_an_answer_that_no_rank_has_heard_of(core, clock):
    core.add_request("a", [1], LONG)
    clock.now = 50.0
    assert ends(core.step()) == [("a", 0, "timeout", "queue_timeout")] and core.finishes == []
    assert not core.has_unfinished()


def test_a_preempted_answer_has_begun_all_the_same(core, clock):
    core.add_request("a", [1, 2, 3], LONG)
    core.step()
    request = core.replica.scheduler.running[0]
    core.replica.scheduler._preempt(request)
    clock.now = 5.0
    assert not ends(core.step()) and core.num_begun == 1
    assert sum(core.stats().queue_time.counts) == 1


def test_times_of_a_request(core, clock):
    core.add_request("a", [1, 2, 3], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    while core.has_unfinished():
        clock.now += 1.0
        core.step()
    stats = core.stats()
    assert (stats.queue_time.total, stats.prefill_time.total, stats.decode_time.total) == (1.0, 0.0, 2.0)
    assert stats.e2e_latency.total == 3.0


def test_in_process_the_finish_reason_says_so(settings):
    with LLM(**settings, request_timeout=0.3) as llm:
        answers = llm.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=250, ignore_eos=True, n=2))
        ended = [answer for output in answers for answer in output.outputs]
        assert {(a.finish_reason, a.stop_reason) for a in ended if len(a.token_ids) < 250} == {
            ("timeout", "request_timeout")
        }
        assert ended[-1].finish_reason == "timeout", "four answers one after the other"
        again = llm.generate("a", SamplingParams(max_tokens=2, temperature=0))[0].outputs[0]
        assert again.finish_reason in ("stop", "length")


@pytest.mark.slow
def test_two_ranks_end_it_together(settings):
    """The other rank has no say in it, and agrees on every step after."""
    short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(**settings | {"max_num_seqs": 4}, tp=2, request_timeout=0.5) as llm:
        before = llm.generate("a", short)[0].outputs[0]
        cut = llm.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=250, ignore_eos=True, n=8))
        after = llm.generate("a", short)[0].outputs[0]
    ended = [answer for output in cut for answer in output.outputs]
    assert {answer.finish_reason for answer in ended} >= {"timeout"}
    assert before.token_ids == after.token_ids and before.finish_reason == "length"
