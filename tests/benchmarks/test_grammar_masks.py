"""The script that says what masks cost: a short run, and that its texts match their grammars."""

from __future__ import annotations

import json

from benchmarks import grammar_masks


def test_a_short_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grammar_masks, "ROUNDS", 1)
    monkeypatch.setattr(grammar_masks.importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "result.json"
    assert grammar_masks.main(["--sizes", "600", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["grammar"], row["guesses"]) for row in rows[:3]] == [
        ("json_object", 0),
        ("json_object", 3),
        ("nested schema", 0),
    ]
    assert len(rows) == 8 and all(0 < row["step us"] <= row["worst us"] for row in rows)
    assert "tool section" in capsys.readouterr().out


def test_every_text_matches_its_grammar():
    tokenizer = grammar_masks.Tokenizer.synthetic(600)
    compiler = grammar_masks.GrammarCompiler(tokenizer)
    for name, case in grammar_masks.cases(tokenizer).items():
        matcher = compiler.submit(case.structured).result().deep_copy()
        assert matcher.try_consume_tokens(case.token_ids) == len(case.token_ids), name
        assert matcher.is_accepting(), name
