"""A chat template comes with the checkpoint: it may neither run without end, nor grow without end, nor reach Python."""

from __future__ import annotations

import pytest

from engine import template_sandbox
from engine.chat_template import ChatTemplate
from engine.errors import InvalidRequestError

ASK = [{"role": "user", "content": "Hi"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
GROWING = "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x OPERATOR n.x %}{% endfor %}"


def render(source: str) -> str:
    return ChatTemplate(source, lambda tools: None).render(ASK)


@pytest.mark.parametrize("source", [LOOP, DOUBLING])
def test_a_template_without_end_is_stopped(monkeypatch, source):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.05)
    with pytest.raises(InvalidRequestError, match="runs longer than"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        GROWING.replace("OPERATOR", "+"),
        GROWING.replace("OPERATOR", "~"),
        "{{ 'x' * 900000 * 900000 }}",
        "{% for i in range(9999) %}{{ 'x' * 100000 }}{% endfor %}",
    ],
)
def test_a_template_that_grows_is_stopped(monkeypatch, source):
    monkeypatch.setattr(template_sandbox, "MAX_TEXT", 2**20)
    with pytest.raises(InvalidRequestError, match="a text of more than"):
        render(source)


@pytest.mark.parametrize(
    "source",
    ["{{ 9 ** 9 ** 9 }}", "{{ 'x' * 10 ** 11 }}", "{{ 'x' | center(10000000000) }}", "{{ 'x'.zfill(10000000000) }}"],
)
def test_a_template_that_computes_with_huge_numbers_is_stopped(source):
    with pytest.raises(InvalidRequestError, match="computes with a number above"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__.__base__}'.format(messages) }}",
    ],
)
def test_a_template_does_not_reach_python(source):
    with pytest.raises(InvalidRequestError, match="unsafe"):
        render(source)


def test_what_templates_do_every_day_still_works():
    source = (
        "{% macro show(m) %}{{ loop is defined }}{{ m.role ~ ': ' ~ m.content + '!' }}{% endmacro %}"
        "{% for m in messages %}{{ loop.first }}{{ show(m) }}{{ '-' * 3 }}{{ 2 ** 3 + 1.5 }}{% break %}{% endfor %}"
    )
    assert render(source) == "TrueFalseuser: Hi!---9.5"
