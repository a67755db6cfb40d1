"""From tokens to deltas, on a byte-level tokenizer: text, stop strings, log-probabilities, and what is sent once."""

from __future__ import annotations

import pytest

from engine.output_processor import OutputProcessor
from engine.request import Request
from engine.sampling import SampledLogprobs
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledRequest, SchedulerOutput
from engine.step_output import ModelRunnerOutput, PromptLogprobs
from engine.tokenizer import Tokenizer
from tests.tokenizers import byte_ranks, write_tokenizer

IM_END = 258  # 256 bytes, then the third special id


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, byte_ranks([]))
    return Tokenizer.from_directory(directory)


class Stream:
    """One sequence fed token by token, as the scheduler and the runner would."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, max_tokens: int = 1000, prompt_len: int = 3):
        self.processor = OutputProcessor(tokenizer)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {IM_END})
        prompt = list(range(97, 97 + prompt_len))
        self.request = Request("r", prompt, params, 0, max_tokens, stop_ids)
        self.processor.add("r", 0, self.request, 0.0)
        self.deltas = []

    def feed(self, token_ids: list[int]) -> Stream:
        for token_id in token_ids:
            if self.deltas and self.deltas[-1].finish_reason:
                break
            item = ScheduledRequest(self.request, self.request.num_tokens - 1, 1, True)
            self.request.commit([token_id])
            self.deltas += self.processor.process(SchedulerOutput([item]), ModelRunnerOutput([[token_id]]))
        return self

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.deltas)

    @property
    def end(self) -> tuple[str | None, str | int | None]:
        return self.deltas[-1].finish_reason, self.deltas[-1].stop_reason


def byte_ids(text: str) -> list[int]:
    """One token a byte, so that characters and stop strings are cut everywhere."""
    return list(text.encode())


def test_characters_come_whole(tokenizer):
    stream = Stream(tokenizer, SamplingParams(max_tokens=None)).feed(byte_ids("a漢🚂z"))
    assert [d.text for d in stream.deltas] == ["a", "", "", "漢", "", "", "", "🚂", "z"]


def test_a_character_that_the_budget_cuts_shows_as_replacement(tokenizer):
    stream = Stream(tokenizer, SamplingParams(max_tokens=2), max_tokens=2).feed(byte_ids("漢"))
    assert stream.text == "�" and stream.end == ("length", None)


@pytest.mark.parametrize(
    ("text", "stops", "visible", "end"),
    [
        ("The quick brown fox jumps", ["own fox"], "The quick br", ("stop", "own fox")),
        ("alpha beta gamma delta", ["beta gamma"], "alpha ", ("stop", "beta gamma")),
        ("一漢字x", ["漢字", "字x", "ab", "abc"], "一", ("stop", "漢字")),
        ("xabc", ["漢字", "字x", "ab", "abc"], "x", ("stop", "ab")),
        ("hello", ["zzz"], "hello", (None, None)),
    ],
)
def test_reported_stop_strings(tokenizer, text, stops, visible, end):
    stream = Stream(tokenizer, SamplingParams(stop=stops, max_tokens=None)).feed(byte_ids(text))
    assert stream.text == visible and stream.end == end
    stopped = stream.processor.take_stopped()
    assert stopped == ([("r", end[1])] if end[0] else []) and stream.processor.take_stopped() == []
    assert bool(stream.processor.sequence_ids("r")) == (end[0] is None)


def test_the_count_ends_with_the_token_that_completes_the_stop_string(tokenizer):
    stream = Stream(tokenizer, SamplingParams(stop="beta", max_tokens=None)).feed(byte_ids("alpha beta gamma"))
    assert sum(len(d.token_ids) for d in stream.deltas) == len("alpha beta")


def test_a_stop_string_may_be_shown(tokenizer):
    params = SamplingParams(stop="beta", include_stop_str_in_output=True, max_tokens=None)
    assert Stream(tokenizer, params).feed(byte_ids("alpha beta gamma")).text == "alpha beta"


@pytest.mark.parametrize(("min_tokens", "visible"), [(0, ""), (2, ""), (3, "ab "), (5, "ab "), (6, "ab abX")])
def test_a_stop_string_counts_from_min_tokens_on_even_where_it_began_before(tokenizer, min_tokens, visible):
    params = SamplingParams(stop="ab", min_tokens=min_tokens, max_tokens=None)
    stream = Stream(tokenizer, params).feed(byte_ids("ab abX"))
    assert stream.text == visible
    assert stream.end == (("stop", "ab") if min_tokens < 6 else (None, None))


def test_held_text_comes_out_at_the_end(tokenizer):
    stream = Stream(tokenizer, SamplingParams(stop="hi there"), max_tokens=5).feed(byte_ids("a hi t"))
    assert stream.text == "a hi " and stream.end == ("length", None)
    stream = Stream(tokenizer, SamplingParams(stop="hi there")).feed([*byte_ids("hi"), IM_END])
    assert stream.text == "hi" and stream.end == ("stop", None)


def test_a_stop_string_wins_over_the_budget_that_ends_with_it(tokenizer):
    stream = Stream(tokenizer, SamplingParams(stop="hi"), max_tokens=2).feed(byte_ids("hi"))
    assert stream.text == "" and stream.end == ("stop", "hi")
    assert stream.processor.take_stopped() == [], "the scheduler ended it by itself"


def test_the_token_that_ends_is_no_text(tokenizer):
    stream = Stream(tokenizer, SamplingParams(stop_token_ids=[ord("q")])).feed(byte_ids("abq"))
    assert stream.text == "ab" and stream.end == ("stop", ord("q"))
    params = SamplingParams(stop_token_ids=[ord("q")], include_stop_str_in_output=True)
    assert Stream(tokenizer, params).feed(byte_ids("abq")).text == "abq"


def test_ignored_ends_are_hidden_unless_asked_for(tokenizer):
    ids = [97, IM_END, 98]
    assert Stream(tokenizer, SamplingParams(ignore_eos=True)).feed(ids).text == "ab"
    shown = Stream(tokenizer, SamplingParams(ignore_eos=True, skip_special_tokens=False)).feed(ids).text
    assert shown == "a<|im_end|>b"


def test_logprob_rows_hold_the_chosen_token_and_the_best(tokenizer):
    stream = Stream(tokenizer, SamplingParams(logprobs=2))
    item = ScheduledRequest(stream.request, 2, 1, True)
    stream.request.commit([120])
    values = SampledLogprobs([-3.0], [5], [[97, 98]], [[-0.5, -1.0]])
    (delta,) = stream.processor.process(SchedulerOutput([item]), ModelRunnerOutput([[120]], logprobs={"r": values}))
    (row,) = delta.logprobs
    assert [(i, r.logprob, r.rank, r.decoded_token) for i, r in row.items()] == [
        (120, -3.0, 5, "x"),
        (97, -0.5, 1, "a"),
        (98, -1.0, 2, "b"),
    ]


def test_ids_of_equal_text_keep_their_own_entries(tokenizer):
    stream = Stream(tokenizer, SamplingParams(logprobs=3))
    item = ScheduledRequest(stream.request, 2, 1, True)
    stream.request.commit([0x80])
    values = SampledLogprobs([-0.1], [1], [[0x80, 0x81, 0x82]], [[-0.1, -2.0, -3.0]])
    (delta,) = stream.processor.process(SchedulerOutput([item]), ModelRunnerOutput([[0x80]], logprobs={"r": values}))
    assert list(delta.logprobs[0]) == [0x80, 0x81, 0x82]
    assert [row.rank for row in delta.logprobs[0].values()] == [1, 2, 3]


def prompt_chunk(first: int, count: int) -> PromptLogprobs:
    return PromptLogprobs(
        first, SampledLogprobs([-float(first + i) for i in range(count)], [1] * count, [[]] * count, [[]] * count)
    )


@pytest.mark.parametrize(
    "chunks", [[(1, 5)], [(1, 2), (3, 3)], [(1, 2), (3, 1), (1, 3), (4, 2)], [(1, 1), (1, 5)], [(1, 5), (1, 2), (3, 3)]]
)
def test_prompt_logprobs_from_chunks_and_repeats_are_whole_and_sent_once(tokenizer, chunks):
    """A preempted prompt is computed again in other chunks; each position counts once."""
    stream = Stream(tokenizer, SamplingParams(prompt_logprobs=0), prompt_len=6)
    processor, request = stream.processor, stream.request
    for first, count in chunks:
        item = ScheduledRequest(request, first - 1, count, False)
        output = ModelRunnerOutput(prompt_logprobs={"r": prompt_chunk(first, count)})
        assert processor.process(SchedulerOutput([item]), output) == []
    deltas = stream.feed([97, 98]).deltas
    assert deltas[1].prompt_logprobs is None
    rows = deltas[0].prompt_logprobs
    assert rows[0] is None
    assert [(list(r), next(iter(r.values())).logprob) for r in rows[1:]] == [([97 + i], -float(i)) for i in range(1, 6)]


def test_abort_says_so_once(tokenizer):
    stream = Stream(tokenizer, SamplingParams()).feed([97])
    delta = stream.processor.abort("r")
    assert (delta.request_id, delta.index, delta.finish_reason, delta.token_ids) == ("r", 0, "abort", [])
    assert stream.processor.abort("r") is None and stream.processor.request_ids() == []


def test_times_are_kept(tokenizer):
    stream = Stream(tokenizer, SamplingParams(), max_tokens=2).feed([97, 98])
    metrics = stream.deltas[-1].metrics
    assert stream.deltas[0].metrics is None and metrics.ttft > 0 and metrics.decode_time >= 0


def in_steps(stream: Stream, token_ids: list[int], sizes: list[int]) -> Stream:
    """Fed as steps that commit up to so many tokens each; the last size goes on."""
    fed = 0
    while fed < len(token_ids) and not (stream.deltas and stream.deltas[-1].finish_reason):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        step, request = token_ids[fed : fed + size], stream.request
        fed += len(step)
        item = ScheduledRequest(request, request.num_tokens - 1, 1, True, len(step) - 1)
        request.commit(step)
        rows = SampledLogprobs([-float(t) for t in step], [1] * size, [[t] for t in step], [[-float(t)] for t in step])
        logprobs = {"r": rows} if request.params.logprobs is not None else {}
        output = ModelRunnerOutput([step], logprobs=logprobs)
        stream.deltas += stream.processor.process(SchedulerOutput([item]), output)
    return stream


@pytest.mark.parametrize("sizes", [[1], [2], [3], [5], [1, 4, 2, 5], [40]], ids=str)
@pytest.mark.parametrize(
    ("text", "params", "max_tokens"),
    [
        ("a漢🚂z é", {}, 1000),
        ("The quick brown fox jumps", {"stop": ["own fox"]}, 1000),
        ("The quick brown fox jumps", {"stop": ["own fox"], "include_stop_str_in_output": True}, 1000),
        ("一漢字x", {"stop": ["漢字", "字x", "ab", "abc"]}, 1000),
        ("ab abX ab", {"stop": "ab", "min_tokens": 4}, 1000),
        ("ab abX ab", {"stop": "ab", "min_tokens": 6}, 1000),
        ("a hi there", {"stop": "hi there"}, 5),
        ("xx hi hi", {"stop": "hi"}, 5),
        ("漢字", {}, 4),
        ("abcqdef", {"stop_token_ids": [ord("q")]}, 1000),
        ("abcqdef", {"stop_token_ids": [ord("q")], "include_stop_str_in_output": True}, 1000),
        ("abcqdef", {"stop_token_ids": [ord("q")], "min_tokens": 5}, 1000),
        ("ab\0cd", {}, 1000),
        ("ab\0cd", {"ignore_eos": True}, 1000),
        ("ab\0cd", {"ignore_eos": True, "skip_special_tokens": False}, 1000),
        ("hi\0there", {"stop": "hi there", "min_tokens": 1}, 1000),
    ],
)
def test_steps_of_several_tokens_say_what_single_ones_say(tokenizer, text, params, max_tokens, sizes):
    """A character, a stop string, the end token and the budget inside a step; nothing after the end. \\0 is the end."""
    token_ids = [IM_END if token == 0 else token for token in byte_ids(text)]
    params = SamplingParams(logprobs=1, max_tokens=None, **params)
    one = in_steps(Stream(tokenizer, params, max_tokens), token_ids, [1])
    many = in_steps(Stream(tokenizer, params, max_tokens), token_ids, list(sizes))
    assert many.text == one.text and many.end == one.end
    ids = [t for d in many.deltas for t in d.token_ids]
    assert ids == [t for d in one.deltas for t in d.token_ids] == token_ids[: len(ids)]
    rows = [row for d in many.deltas for row in d.logprobs]
    assert [list(row) for row in rows] == [[t] for t in ids], "a row for each token shown, and none beyond"
    assert all(row[t].logprob == -t for row, t in zip(rows, ids, strict=True))
    assert len(many.processor.take_stopped()) == len(one.processor.take_stopped()) or many.request.finished
    assert many.processor.request_ids() == one.processor.request_ids()


def test_a_stop_string_inside_the_step_that_also_ends_otherwise(tokenizer):
    """The text says stop; the scheduler has ended the request by itself and need not be told."""
    stream = in_steps(Stream(tokenizer, SamplingParams(stop="b"), max_tokens=4), byte_ids("abcd"), [4])
    assert stream.text == "a" and stream.end == ("stop", "b") and stream.processor.take_stopped() == []
    (delta,) = stream.deltas
    assert delta.token_ids == byte_ids("ab")


def test_deltas_tell_how_many_guesses_came_true(tokenizer):
    stream = in_steps(Stream(tokenizer, SamplingParams(), max_tokens=6), byte_ids("abcd"), [4])
    stream.request.num_draft_tokens, stream.request.num_accepted_tokens = 9, 1
    metrics = in_steps(stream, byte_ids("ef"), [2]).deltas[-1].metrics
    assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (9, 1)
