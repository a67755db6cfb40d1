"""The whole page in a headless Chromium against `serve.py` on the bundled checkpoint. The pictures that it takes stay
in pytest's directory (`--basetemp DIR` says where); `docs/page.png` is one of them."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import pytest

from tests.chromium import BINARY, Tab, browsing
from tests.processes import PYTHON, serving

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BINARY is None, reason="no chromium in PATH")]

MOST_BYTES = 300_000
IS_LIVE = "document.getElementById('status').dataset.state === 'live'"
IS_DONE = "!document.querySelector('[aria-busy]') && !document.getElementById('send').hidden"
# Cells that differ from the emptiest one, as the canvas shows them.
COLOURS = """(() => {
  const canvas = document.getElementById("heat-map"), seen = new Set();
  const data = canvas.getContext("2d").getImageData(30, 0, canvas.width - 30, canvas.height).data;
  for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 3).join());
  return seen.size;
})()"""


def text(tab: Tab, id: str) -> str:
    return tab.run(f"document.getElementById('{id}').innerText")


def number(tab: Tab, id: str) -> float:
    return float(text(tab, id).split()[0].replace(",", ""))


def ask(tab: Tab, message: str) -> str:
    """Types a message and returns the finished answer, with its thinking."""
    tab.run("document.getElementById('message').focus()")
    tab.type(message, "Enter")
    tab.until(f"!!document.querySelector('.turn.assistant:last-child') && {IS_DONE}")
    assert not tab.run("document.querySelector('.problem')?.textContent")
    return tab.run("document.querySelector('.turn.assistant:last-child').textContent")


def hover_heat_map(tab: Tab, across: float, down: float) -> None:
    box = tab.run("(b => [b.x, b.y, b.width, b.height])(document.getElementById('heat-map').getBoundingClientRect())")
    x, y, width, height = box
    tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + across * width, y=y + down * height)


def check_requests(tab: Tab, port: int) -> None:
    assert {urlsplit(url).netloc for url in tab.requested} == {f"127.0.0.1:{port}"}


def test_chatting_and_watching(tmp_path):
    with serving(PYTHON, tmp_path, "--draft", "auto", "--tp", "2", "--ep", "2") as (_, port), browsing(tmp_path) as tab:
        tab.look(1280, 800)
        tab.open(f"http://127.0.0.1:{port}/")
        tab.until(IS_LIVE)
        assert text(tab, "model") == "tiny" and "No answer has begun yet." in text(tab, "first-token-panel")

        assert "42" in ask(tab, "What is 17 + 25?")
        assert tab.run("document.querySelector('.reasoning').open") is False
        assert "guesses right" in tab.run("document.querySelector('.numbers').textContent")

        tab.until("document.getElementById('comm-rows').children.length > 2 && !!document.querySelector('.fill')")
        rows = tab.run("[...document.querySelectorAll('#comm-rows tr')].map((row) => row.innerText.split('\\t'))")
        shown = {kind: (float(rounds), time) for kind, rounds, time in rows}
        assert shown["attention reduce"][0] == 5 and float(shown["all"][1].replace(",", "")) > 0
        assert 1 <= number(tab, "accept-length") <= 4
        assert tab.run("document.querySelectorAll('#positions li').length") == 3
        assert number(tab, "first-token") > 0 and number(tab, "inter-token") > 0
        tab.until("Number(document.getElementById('kv-cached-count').innerText) > 0")  # once the answer has ended
        assert number(tab, "kv-free-count") > 100
        assert "2 ranks, the busiest 1." in text(tab, "imbalance") and tab.run(COLOURS) > 20
        assert text(tab, "experts-shape") == "4 layers × 32 experts"

        tab.run("document.getElementById('heat-map').focus()")
        tab.type("", "ArrowRight")
        tab.type("", "ArrowRight")
        tab.type("", "ArrowDown")
        assert text(tab, "heat-readout").startswith("layer 2 · expert 1 · ")

        ask(tab, "Tell me a short story about a fox.")
        assert tab.run("document.querySelectorAll('.turn').length") == 4
        tab.type("Tell me a story about a fox and a bear.", "Enter")
        tab.until("document.querySelector('.turn:last-child > .text')?.textContent.length > 60")
        hover_heat_map(tab, 0.64, 0.87)
        assert text(tab, "heat-readout").startswith("layer 4 · expert 20 · ")
        tab.until("document.getElementById('running').innerText === '1'")
        assert number(tab, "token-rate") > 0 and number(tab, "kv-held-count") > 0
        tab.screenshot(tmp_path / "page.png")
        tab.run("document.getElementById('stop').click()")
        tab.until(IS_DONE)
        assert "Stopped." in tab.run("document.querySelector('.turn:last-child').innerText")
        tab.until("document.getElementById('running').innerText === '0'")

        tab.look(1280, 800, "light")
        tab.screenshot(tmp_path / "page-light.png")
        tab.look(390, 844, is_mobile=True)
        assert tab.run("document.documentElement.scrollWidth") == 390
        tab.screenshot(tmp_path / "page-phone.png", is_whole=True)
        assert 20_000 < (tmp_path / "page.png").stat().st_size < MOST_BYTES
        assert tab.problems == []
        check_requests(tab, port)


def test_keys_and_panels_without_data(tmp_path):
    options = ("--api-key", "a key", "--no-expert-load")
    with serving(PYTHON, tmp_path, *options) as (_, port), browsing(tmp_path) as tab:
        tab.open(f"http://127.0.0.1:{port}/")
        for key, reason in (("wrong", "This server asks for a key."), ("a key", "The server does not know this key")):
            dialog = "document.getElementById('key-dialog')"
            tab.until(f"{dialog}.open && {dialog}.innerText.includes({reason!r})")
            tab.type(key, "Enter")
        tab.until(IS_LIVE)
        assert text(tab, "draft-panel").endswith("No draft loaded; start the server with --draft to speculate.")
        assert text(tab, "experts-panel").endswith("start it without --no-expert-load.")
        assert "42" in ask(tab, "What is 17 + 25?")
        tab.until("document.getElementById('comm-panel').innerText.endsWith('One rank: no communication.')")
        tab.run("document.getElementById('tools').value = '{'")
        tab.type("Hi", "Enter")
        problem = tab.until("document.querySelector('.turn:last-child .problem')?.textContent")
        assert problem.startswith("The tools in the settings are not JSON")
        assert tab.run("document.getElementById('message').value") == "Hi", "it can be sent again"
        tab.run("document.getElementById('tools').value = ''; document.getElementById('temperature').value = 3")
        tab.type("", "Enter")
        assert tab.run("document.querySelectorAll('.turn').length") == 4, "the form shows what is wrong with it"
        assert tab.run("document.activeElement.id") == "temperature"
        tab.run("document.getElementById('new-chat').click()")
        assert tab.run("document.querySelectorAll('.turn').length") == 0
        refusals = ("401 (Unauthorized)", "404 (Not Found)")
        assert [problem for problem in tab.problems if not any(known in problem for known in refusals)] == []
        check_requests(tab, port)


def test_a_tool_call_and_its_result(tmp_path):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the weather for a city", "parameters": parameters}
    tools = json.dumps([{"type": "function", "function": function}])
    with serving(PYTHON, tmp_path) as (_, port), browsing(tmp_path) as tab:
        tab.open(f"http://127.0.0.1:{port}/")
        tab.until(IS_LIVE)
        tab.run(f"document.getElementById('tools').value = {json.dumps(tools)}")
        tab.run("document.getElementById('temperature').value = '0'")
        ask(tab, "What is the weather in Paris?")
        assert tab.run("document.querySelector('.call h4').textContent") == "get_weather"
        assert json.loads(tab.run("document.querySelector('.call pre').textContent")) == {"city": "Paris"}
        assert "21" in ask(tab, '{"temperature": 21, "sky": "clear"}')
        assert tab.run("document.querySelector('.turn.tool .who').textContent") == "Result of get_weather"
        assert tab.problems == []
        check_requests(tab, port)
