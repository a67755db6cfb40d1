"""The benchmark of parser, detokeniser and template measures answers that are read as it says."""

from __future__ import annotations

import json

from benchmarks import parser_cost
from engine.config import TINY_CHECKPOINT
from engine.server.output_parser import ArgumentsDelta, CallDelta, TextDelta
from engine.tokenizer import Tokenizer


def test_its_answers_hold_what_their_names_say():
    tokenizer = Tokenizer.from_directory(TINY_CHECKPOINT)
    for per_step in (1, 4):
        deltas = []
        for answer in parser_cost.answers(tokenizer, per_step):
            parser = parser_cost.parser_for(tokenizer)
            found = [delta for ids, text in answer.steps for delta in parser.push(ids, text)]
            deltas.append(found + parser.finish("stop", None)[0])
            assert parser.errors == [] and answer.num_tokens == sum(len(ids) for ids, _ in answer.steps)
        texts, one_call, many_calls = deltas
        assert {delta.channel for delta in texts if isinstance(delta, TextDelta)} == {"reasoning", "content"}
        arguments = "".join(delta.text for delta in one_call if isinstance(delta, ArgumentsDelta))
        assert len(json.loads(arguments)["text"]) == 20_000
        assert sum(isinstance(delta, CallDelta) for delta in many_calls) == 300


def test_a_round_has_a_row_for_everything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parser_cost, "PROSE", "A word. ")
    monkeypatch.setattr(parser_cost, "NAMES", ("tool_0", "tool_1"))
    file = tmp_path / "cost.json"
    assert parser_cost.main(["--rounds", "1", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert len(written["rows"]) == 2 * 3 * 3 + 3 and all(row["us a token"] > 0 for row in written["rows"])
    assert "us a token" in capsys.readouterr().out
