"""`LLM` with several ranks in plain, unguarded scripts and under torchrun: same results, and nothing left behind."""

from __future__ import annotations

import json
import signal
import socket
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import launch
from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.launch import start_engine
from engine.loading.weights import Checkpoint
from tests.checkpoints import SMALL, build_checkpoint
from tests.processes import PYTHON, TORCHRUN, Program, running, until

HEAD = """
import os, sys
from engine import LLM, SamplingParams
def make(**settings):
    return LLM(**{"model": MODEL, "device": "cpu", "num_threads": 1, "tp": 2, **settings})
def say(word, value=""):
    os.write(1, f"{word} {value}\\n".encode())
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
def ids(llm):
    return llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
"""
STANDALONE = [*TORCHRUN, "--standalone"]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    return str(build_checkpoint(tmp_path_factory.mktemp("small"), SMALL))


@pytest.fixture
def script(small, tmp_path):
    """Starts a script of the given body; the object and all it started are gone at the end of the test."""
    programs = []

    def start(body: str, launcher: list[str] = PYTHON) -> Program:
        file = tmp_path / f"script{len(programs)}.py"
        file.write_text(HEAD.replace("MODEL", repr(small)) + textwrap.dedent(body))
        programs.append(Program([*launcher, str(file)], tmp_path))
        return programs[-1]

    yield start
    for program in programs:
        program.kill()


def said(program: Program, word: str) -> list:
    return [json.loads(x.split(" ", 1)[1]) for x in program.output.splitlines() if x.startswith(f"{word} ")]


def test_ranks_end_with_the_object_and_a_second_engine_follows(script):
    """Also that a second one while the first lives is refused, without a rank started for nothing."""
    program = script("""
        llm = make()
        say("ids", ids(llm))
        try:
            make()
        except ValueError as error:
            say("refused", repr(str(error)).replace("'", '"'))
        workers = [c.pid for c in llm._ranks.children]
        del llm
        say("alive", [p for p in workers if os.path.exists(f"/proc/{p}")])
        with make(ep=2) as llm:
            say("ids", ids(llm))
        try:
            llm.generate("The")
        except RuntimeError as error:
            say("closed", repr(str(error)).replace("'", '"'))
        say("ids", ids(make(tp=1)))
    """)
    assert program.process.wait(120) == 0, program.output
    assert not program.commands()
    first, second, third = said(program, "ids")
    assert first == second == third and len(first) == 6
    assert said(program, "alive") == [[]]
    assert "process group" in said(program, "refused")[0] and "closed" in said(program, "closed")[0]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param("", 0, id="end", marks=pytest.mark.slow),
        pytest.param("raise RuntimeError('of the script')", 1, id="exception"),
        pytest.param("sys.exit(7)", 7, id="exit"),
        pytest.param("os._exit(3)", 3, id="hard_exit", marks=pytest.mark.slow),
    ],
)
def test_ranks_end_with_the_process(script, end, code):
    program = script(f"llm = make()\nids(llm)\nsay('ready')\n{end}")
    program.expect("ready ")
    assert program.ends() == code, program.output
    assert ("of the script" in program.output) == (code == 1)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_ranks_end_when_a_signal_ends_the_script(script, number):
    program = script("""
        llm = make()
        say("ready")
        while True:
            llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    """)
    program.expect("ready ")
    program.signal(number)
    assert program.ends() != 0
    assert ("KeyboardInterrupt" in program.output) == (number == signal.SIGINT)


def test_ctrl_c_in_generate_leaves_the_engine_usable(script):
    program = script("""
        import signal, threading
        llm = make()
        before = ids(llm)
        def steps():
            return llm._engine.stats().num_steps
        start = steps()
        def interrupt():
            while steps() < start + 5:
                pass
            os.kill(os.getpid(), signal.SIGINT)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            llm.generate(["The"] * 4, SamplingParams(max_tokens=4000, ignore_eos=True))
        except KeyboardInterrupt:
            say("interrupted")
        thread.join()
        stats = llm._engine.stats()
        say("left", [stats.num_running, stats.num_waiting, stats.kv_cache_usage])
        say("same", int(ids(llm) == before))
    """)
    assert program.process.wait(120) == 0, program.output
    assert "interrupted" in program.output and said(program, "left") == [[0, 0, 0.0]] and said(program, "same") == [1]


def test_a_lost_rank_is_named_to_this_call_and_to_later_ones(script):
    program = script("""
        import signal
        llm = make()
        ids(llm)
        os.kill(llm._ranks.children[0].pid, signal.SIGKILL)
        for _ in range(2):
            try:
                while True:
                    ids(llm)
            except RuntimeError as error:
                say("failure", repr(str(error)).replace("'", '"'))
    """)
    assert program.process.wait(120) == 0, program.output
    first, second = said(program, "failure")
    assert "rank 1" in first and "rank 1" in second


def test_a_rank_that_dies_while_starting_is_named(script):
    """The rank never connects; rank 0 does not wait for its whole patience."""
    program = script("""
        sys.executable = "/bin/false"
        make()
    """)
    assert program.ends() == 1
    assert "rank 1 ended with exit code 1" in program.output, program.output


CALLS = """
llm = make()
results = [
    [o.outputs[0].token_ids for o in llm.generate(["The", "One two"], GREEDY)],
    [o.prompt_logprobs is None for o in llm.generate("The", GREEDY)],
    list(map(str, llm.generate([[1, 2, 3]], SamplingParams(seed=1, max_tokens=4, logprobs=2, prompt_logprobs=1, n=2))[0]
         .outputs)),
    [o.outputs[0].text for o in llm.chat([{"role": "user", "content": "Hi"}], GREEDY)],
    [d.token_ids for d in llm.stream("The", GREEDY)],
]
stream = llm.stream("The", SamplingParams(max_tokens=500, ignore_eos=True))
next(stream)
stream.close()
for wrong in ([], [[]], ["ok", [10**9]]):
    try:
        results.append(len(llm.generate(wrong, GREEDY)))
    except ValueError as error:
        results.append([str(error), error.param])
results.append(ids(llm))
results.append(llm.get_tokenizer().encode("The"))
import json
say("results", json.dumps(results))
"""


def test_under_torchrun_every_rank_gets_the_same_results(script):
    """generate, chat and stream, a stream closed early, and refusals; the numbers are those of one process."""
    program = script(CALLS, [*STANDALONE, "--nproc-per-node", "2"])
    alone = script(CALLS.replace("make()", "make(tp=1)"))
    assert program.process.wait(120) == 0, program.output
    assert alone.process.wait(120) == 0, alone.output
    first, second = said(program, "results")
    assert first == second
    (expected,) = said(alone, "results")
    assert first[0] == expected[0] and first[3:] == expected[3:]
    assert not program.commands()


@pytest.mark.parametrize("by_rank", ["max_num_seqs=8 + int(os.environ['RANK'])", "moe_comm=COMM"])
def test_ranks_with_different_settings_all_stop_with_the_name(script, by_rank):
    body = f"""
        COMM = ["allreduce", "reference"][int(os.environ["RANK"])]
        try:
            make({by_rank})
        except ValueError as error:
            say("refused", repr(str(error)).replace('"', "").replace("'", '"', 1)[:-1] + '"')
            sys.exit(2)
    """
    program = script(body, [*STANDALONE, "--nproc-per-node", "2"])
    assert program.ends() != 0
    lines = [x for x in program.output.splitlines() if x.startswith("refused ")]
    assert len(lines) == 2 and all(by_rank.split("=")[0] in x and "rank 1" in x for x in lines), program.output


def test_a_wrong_number_of_ranks_under_torchrun(script):
    program = script("make(tp=4)", [*STANDALONE, "--nproc-per-node", "2"])
    assert program.ends() != 0
    assert "torchrun started 2 ranks, but tp=4" in program.output


def two_agents(script, body: str) -> list[Program]:
    """Two torchrun agents that meet over c10d on one machine, as two hosts would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    options += ["--rdzv-id", "one", "--rdzv-conf"]
    return [script(body, [*TORCHRUN, *options, f"is_host={is_host}"]) for is_host in (1, 0)]


@pytest.mark.slow
def test_two_agents_give_the_tokens_of_one_process(script):
    programs = [*two_agents(script, "say('ids', ids(make()))"), script("say('ids', ids(make(tp=1)))")]
    for program in programs:
        assert program.process.wait(120) == 0, program.output
    first, second, alone = (said(program, "ids") for program in programs)
    assert first == second == alone


def test_a_killed_agent_ends_the_other_with_a_reason(script):
    """Its own rank, which outlives it, too."""
    body = """
        llm = make()
        ids(llm)
        say("rank", os.environ["RANK"])
        while True:
            ids(llm)
    """
    host, other = two_agents(script, body)
    rank = int(other.expect(r"rank (\d)")[1])
    host.expect(rf"rank {1 - rank}")
    other.signal(signal.SIGKILL)
    assert other.ends(30) == -signal.SIGKILL and host.ends(30) != 0
    assert f"EngineDeadError: rank {rank} has lost the torchrun that started it" in host.output, host.output


def test_a_worker_without_rank_0_ends(small, tmp_path):
    command = [*PYTHON, "-m", "engine.worker", "--rank", "1", "--world-size", "2", "--store", "127.0.0.1:9"]
    with running(command, Path(tmp_path)) as program:
        assert until(lambda: program.process.poll() is not None, 30, "the worker ends")
        assert program.process.returncode == 1


def test_graphs_end_before_the_process_group_that_they_hold(monkeypatch):
    """NCCL's end of a communicator waits for graphs that captured its collectives."""
    order = []
    runner = SimpleNamespace(close=lambda: order.append("runner"))
    monkeypatch.setattr(launch, "end_process_group", lambda has_failed: order.append("group"))
    ranks = launch.Ranks(0, 2, runner=runner)
    ranks.close()
    assert order == ["runner", "group"]
    ranks.close()
    assert order == ["runner", "group", "group"], "a runner ends once"


class SlowSums(dict):
    """A store in which rank 0 has its checksums when rank 1 looks for the third time."""

    num_checks = 0

    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        self.num_checks += 1
        if self.num_checks == 3:
            self.set("turnout/sums/0", "1")
        return all(key in self for key in keys)


def test_ranks_of_torchrun_wait_for_the_one_with_the_most_checksums(monkeypatch):
    """Before they meet, for which there is a limit."""
    store, met = SlowSums(), []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(launch.dist, "rendezvous", lambda *_, **__: iter([(store, 1, 2)]))
    monkeypatch.setattr(launch, "ControlClient", lambda *_: met.append(sorted(store)))
    for verifies in (True, False):
        launch._join(EngineConfig(device="cpu", tp=2, verify_checksums=verifies), 2)
    assert met[0] == ["turnout/sums/0", "turnout/sums/1"] and store.num_checks == 3, "once, and only where asked for"
    monkeypatch.setattr(launch, "_agent_watch", lambda: lambda: "has lost the torchrun that started it")
    store.clear()
    with pytest.raises(EngineDeadError, match="has lost the torchrun"):
        launch._join(EngineConfig(device="cpu", tp=2, verify_checksums=True), 2)


def test_the_headers_of_the_checkpoint_are_read_once(monkeypatch):
    """For the full one that takes seconds, and what is checked first is what is loaded."""
    opened = []
    init = Checkpoint.__init__
    monkeypatch.setattr(Checkpoint, "__init__", lambda self, path: (opened.append(str(path)), init(self, path))[1])
    core, ranks = start_engine(EngineConfig(device="cpu", num_threads=1, max_model_len=64))
    ranks.close()
    assert opened == [core.config.model]
