"""The server for clients that want a certain answer."""

from __future__ import annotations

from tests.engine.server.harness import serving
from tests.engine.server.markup import call, called, declare, section
from tests.engine.server.stub_server import make_stub, wish


def test_each_request_says_what_its_answer_will_be():
    with serving(make_stub([1, 3])) as server:
        for answer, content, calls in (
            ("r</think>漢字😀", "漢字😀", None),
            ("r</think>ab", "ab", None),
            ("r</think>abc", "abc", None),
            ("r" + section(call("functions.f:0", '{"x":1}')), None, [("functions.f:0", "f", '{"x":1}')]),
        ):
            messages = [{"role": "user", "content": wish("another")}, {"role": "user", "content": f"Do {wish(answer)}"}]
            for choice in server.chat(messages=messages, tools=declare("f"), n=2)["choices"]:
                message = choice["message"]
                assert (message["content"], message["reasoning"], called(message)) == (content, "r", calls)
        assert server.chat()["choices"][0]["message"]["content"] == "answer"
