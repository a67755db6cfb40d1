"""Compiles what answers must be, each text once, on a thread with a stack that any allowed text fits."""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from engine.errors import InvalidRequestError
from engine.grammar import bounds
from engine.grammar.vocabulary import Vocabulary, error_of
from engine.structured_outputs import StructuredOutputs
from engine.tokenizer import Tokenizer, check_encodable

MAX_RENEWED = 2  # grammars a step, each some 0.1 s
MAX_REPLAYED = 65_536  # tokens a step, at some 3 us
REPLAYED_AT_ONCE = 32  # tokens, since llguidance's limits are for a call
MAX_COMPILED = 64  # of a lexer each, which may grow to some 25 MB
# llguidance descends into rules that refer to rules, up to 8 KiB each; addresses alone, memory only as it is used.
STACK_BYTES = 512 * 2**20
# Its own bounds, which are counts and no times: symbols, and steps that building the lexer takes, 50 ms of them (the
# same steps bound how far `a{1000000}` is followed at once: 0.5 s with five times as many). Those of a mask are its
# defaults: 200,000 lexer steps and 50,000 parser items, some 15 ms each on one idle core; but a row of five
# items for each of MAX_KEYS keys that an object may leave out.
LIMITS = {
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 200_000,
    "max_items_in_row": 5 * bounds.MAX_KEYS,
    "max_lexer_states": 60_000,
    "verbose_errors": False,
}
# Between two JSON tokens: what printers write. With no bound a model that likes spaces or empty lines may write nothing
# else until its budget ends.
WHITESPACE = r" {1,4}|\r?\n( {0,32}|\t{0,16})"
_MAX_REASON = 300


class _Worker:
    """One thread with a large stack, started by the first call."""

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._has_thread = False

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        """Not from two threads at once."""
        if self._has_thread:
            return self._pool.submit(function, *arguments)
        before = threading.stack_size(STACK_BYTES)
        try:
            return self._pool.submit(function, *arguments)
        finally:
            threading.stack_size(before)
            self._has_thread = True


class GrammarCompiler:
    """Keeps the last MAX_COMPILED results of each kind, refusals included.

    Copies of a matcher share their lexer, which grows as they move and counts towards its limits, and which an error of
    one makes useless to all. So matchers of a step's requests come from `submit` alone, which all ranks call alike, and
    `check`, which only rank 0 calls, shares nothing with them.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._checked: OrderedDict[tuple[str, str], Future] = OrderedDict()
        self._done: OrderedDict[tuple[str, str], Future] = OrderedDict()
        self._renewed: dict[tuple[str, str], Any] = {}
        self._num_replayed = 0
        self._checks, self._steps = _Worker("grammar check"), _Worker("grammar")

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        with self._lock:
            return Vocabulary(self._tokenizer)

    def check(self, structured: StructuredOutputs) -> None:
        """Raises InvalidRequestError for what cannot be compiled. Any thread may call it."""
        key = (structured.kind, _text(structured))
        with self._lock:
            future = _kept(self._checked, key, lambda: self._checks.submit(self._try, *key))
        _result(future)

    def submit(self, structured: StructuredOutputs) -> Future:
        """Its result: an LLMatcher at the grammar's start, to be copied. It raises InvalidRequestError."""
        key = (structured.kind, _text(structured))
        return _kept(self._done, key, lambda: self._steps.submit(self._compile, *key))

    def begin_step(self) -> None:
        """A step's renewals are counted from here on; all ranks call it alike."""
        self._renewed.clear()
        self._num_replayed = 0

    def renew(self, structured: StructuredOutputs, token_ids: Sequence[int]) -> Any:
        """A matcher that has taken token_ids, with a lexer that is new in this step; None if it cannot take them, or
        the step has renewed as much as it may.

        The answers of one grammar share the new lexer, as they shared the old one: what met its limit for one meets it
        for all, and a compilation for each would hold up everyone."""
        key = (structured.kind, _text(structured))
        self._num_replayed += len(token_ids)
        is_new = key not in self._renewed
        if self._num_replayed > MAX_REPLAYED or (is_new and len(self._renewed) == MAX_RENEWED):
            return None
        if is_new:
            self._done.pop(key, None)
            self._renewed[key] = self.submit(structured).result()
        matcher = self._renewed[key].deep_copy()
        for start in range(0, len(token_ids), REPLAYED_AT_ONCE):
            part = token_ids[start : start + REPLAYED_AT_ONCE]
            if matcher.try_consume_tokens(part) != len(part):
                return None
        return matcher

    def _compile(self, kind: str, text: str) -> Any:
        return _compile(self.vocabulary, kind, text)

    def _try(self, kind: str, text: str) -> None:
        self._compile(kind, text)


def _result(future: Future) -> Any:
    """What it has come to. A refusal is raised as a new one: the one that is kept would take on, and hold, the frames
    of everyone to whom it is raised."""
    error = future.exception()
    if isinstance(error, InvalidRequestError):
        raise InvalidRequestError(str(error), error.param)
    return future.result()


def _kept(done: OrderedDict[tuple[str, str], Future], key: tuple[str, str], start: Callable[[], Future]) -> Future:
    future = done.pop(key, None) or start()
    done[key] = future
    while len(done) > MAX_COMPILED:
        done.popitem(last=False)
    return future


def _compile(vocabulary: Vocabulary, kind: str, text: str) -> Any:
    import llguidance

    try:
        grammar = _GRAMMARS[kind](text)
    except bounds.Refusal as error:
        raise _refusal(kind, str(error)) from None
    matcher = vocabulary.matcher(grammar, llguidance.LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise _refusal(kind, error_of(matcher))
    for reason in ("nothing matches it. ", ""):  # the first may use up what its lexer may take, and leave others none
        copy = matcher.deep_copy()
        mask = np.frombuffer(copy.compute_bitmask(), dtype=np.int32)
        if copy.is_error() or not mask.any():
            raise _refusal(kind, reason + error_of(copy))
    return matcher


def _refusal(kind: str, reason: str) -> InvalidRequestError:
    words = " ".join(reason.split())
    words = words if len(words) <= _MAX_REASON else f"{words[:_MAX_REASON]}..."
    return InvalidRequestError(f"structured_outputs: this {kind} cannot be used: {words}.", "structured_outputs")


def _text(structured: StructuredOutputs) -> str:
    """What is compiled, as text; raises InvalidRequestError for what is none."""
    kind, value = structured.kind, getattr(structured, structured.kind)
    if kind == "json_object":
        return ""
    if kind == "choice":
        if not value or not all(isinstance(one, str) for one in value):
            raise _refusal(kind, "give a list of at least one text")
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise _refusal(kind, "give it as text")
    check_encodable(value)
    return value


def _json_schema(text: str) -> str:
    import llguidance

    schema = bounds.check_json(text)
    if schema is not True and not isinstance(schema, dict):
        raise bounds.Refusal("a schema is an object")
    options = {"whitespace_pattern": WHITESPACE, "coerce_one_of": True}  # one alternative at least: text grows
    try:
        return llguidance.LLMatcher.grammar_from_json_schema("{}" if schema is True else text, overrides=options)
    except ValueError as error:
        raise bounds.Refusal(str(error)) from None


def _regex(text: str) -> str:
    import llguidance

    bounds.check_regex(text)
    return llguidance.LLMatcher.grammar_from_regex(text)


def _choice(text: str) -> str:
    """As one terminal, which the lexer makes a tree of: as alternatives of a rule thousands would be too many."""
    import llguidance

    bounds.check_length(text)
    choices = json.loads(text)
    if len(choices) > bounds.MAX_CHOICES:
        raise bounds.Refusal(f"it has {len(choices)} texts, more than the {bounds.MAX_CHOICES} allowed")
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}\n")


def _lark(text: str) -> str:
    import llguidance

    bounds.check_lark(text)
    return llguidance.LLMatcher.grammar_from_lark(text)


_GRAMMARS: dict[str, Callable[[str], str]] = {
    "json": _json_schema,
    "json_object": lambda text: _json_schema('{"type": "object"}'),
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}
