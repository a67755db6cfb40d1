"""The page's scripts, one module at a time, in a headless Chromium. Skipped where there is none."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.chromium import BINARY, browsing
from tests.engine.server.harness import HI, serving

pytestmark = pytest.mark.skipif(BINARY is None, reason="no chromium in PATH")

ODD = r"""# HELP odd A family, with "quotes" and \\ in places.
# TYPE odd gauge
odd{path="a\\b",text="one\ntwo, \"three\"} = 4"} 1.5e-07
odd{path="",text="{}"} +Inf
odd{path="minus",text="x"} -Inf
# TYPE bare counter
bare_total 3.0
"""
STREAM = (
    'data: {"choices": [], "text": "é1"}\n\n: keep-alive\n\ndata: {"choices": [], "text": "2 \\n\\n 漢"}\n\n'
    "data: [DONE]\n\n"
)
STREAM_OF = """
const { events } = await import("/page/api.js");
async function read(bytes, size) {
  const parts = [];
  for (let i = 0; i < bytes.length; i += size) parts.push(bytes.slice(i, i + size));
  const body = new ReadableStream({ start(c) { parts.forEach((part) => c.enqueue(part)); c.close(); } });
  const found = [];
  try { for await (const event of events(new Response(body))) found.push(event.text); }
  catch (error) { found.push("! " + error.message); }
  return found;
}
"""
POLLER = """
const { Poller } = await import("/page/poller.js");
const { ApiFailure } = await import("/page/api.js");
const queue = [], reports = [];
window.setTimeout = (action, delay) => queue.push([action, delay]);
window.clearTimeout = () => queue.splice(0);
let isHidden = false, polls = 0, next = async () => {};
Object.defineProperty(document, "hidden", { get: () => isHidden, configurable: true });
const poller = new Poller(() => { polls += 1; return next(); }, (state, text) => reports.push([state, text]));
async function turn() {
  const [action, delay] = queue.shift();
  action();
  const before = reports.length;
  while (reports.length === before) await Promise.resolve();
  for (let i = 0; i < 10; i += 1) await Promise.resolve();
  return delay;
}
function hide(hidden) { isHidden = hidden; document.dispatchEvent(new Event("visibilitychange")); }
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with serving() as server, browsing(tmp_path_factory.mktemp("browser")) as tab:
        server.chat(messages=HI)
        tab.open(f"{server.url}/health")  # the same origin, and no script of its own
        yield tab


def run(tab, script: str):
    """What the body of an async function returns."""
    return tab.run(f"(async () => {{ {script} }})()")


def test_the_text_format_is_read_as_prometheus_reads_it(tab):
    metrics = run(tab, 'return (await fetch("/metrics")).text()')
    for text in (ODD, metrics):
        read = f"""const {{ Snapshot }} = await import("/page/prometheus.js");
        return [...new Snapshot({json.dumps(text)}, 0).samples].flatMap(
            ([name, rows]) => rows.map((row) => [name, row.labels, String(row.value)]));"""
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        expected = [(s.name, s.labels, s.value) for s in samples]
        assert len(expected) > 3
        assert [(name, labels, float(value)) for name, labels, value in run(tab, read)] == expected


def test_medians_and_rates_come_from_differences(tab):
    script = """
    const { Snapshot } = await import("/page/prometheus.js");
    const { History } = await import("/page/history.js");
    const bounds = ["1.0", "2.0", "4.0", "+Inf"];
    function at(seconds, steps, counts) {
      const buckets = counts.map((count, i) => `h_bucket{le="${bounds[i]}"} ${count}`);
      const lines = [`turnout_steps_total ${steps}`, ...buckets, `h_count ${counts.at(-1)}`];
      return new Snapshot(lines.join("\\n"), 1000 * seconds);
    }
    const history = new History(), medians = [], rates = [];
    for (const snapshot of [at(0, 10, [0, 0, 0, 0]), at(1, 30, [8, 8, 8, 8]), at(2, 50, [8, 8, 12, 12]),
                            at(12, 50, [8, 8, 12, 12]), at(71, 51, [8, 8, 12, 12]), at(72, 61, [8, 8, 12, 14])]) {
      history.add(snapshot);
      const span = history.recent("h_count");
      medians.push([span.median("h"), span.first !== null]);
      rates.push(history.rate("turnout_steps_total"));
    }
    const points = history.rates("turnout_steps_total").map((point) => point.value);
    history.add(at(73, 5, [0, 0, 0, 0]));
    return { medians, rates, points, afterRestart: history.rate("turnout_steps_total") };
    """
    seen = run(tab, script)
    # Nothing, then 8 in (0, 1], then 4 more in (2, 4]: the 6th of 12 is still in the first bucket. In the minute
    # before 71 s nothing came, so all counts; at 72 s the two new ones lie above every bound.
    assert seen["medians"][:3] == [[None, False], [0.5, True], [0.75, True]]
    assert seen["medians"][4:] == [[0.75, False], [4, True]]
    assert seen["rates"] == [None, 20, 20, None, None, 10]
    assert seen["points"] == [20, 20, None, None, 10], "a rate over a long silence is none"
    assert seen["afterRestart"] is None, "counters that fell are of another server"


def test_a_stream_reads_the_same_however_it_is_cut(tab):
    whole = ["é1", "2 \n\n 漢"]
    size = len(STREAM.encode())
    script = f"""{STREAM_OF} const bytes = new TextEncoder().encode({json.dumps(STREAM)}), all = [];
    for (let size = 1; size <= bytes.length; size += 1) all.push(await read(bytes, size));
    return all;"""
    assert run(tab, script) == [whole] * size


@pytest.mark.parametrize(
    ("stream", "found"),
    [
        (STREAM[:30], ["! The stream ended before the answer was complete."]),
        (
            STREAM.removesuffix("data: [DONE]\n\n"),
            ["é1", "2 \n\n 漢", "! The stream ended before the answer was complete."],
        ),
        ('data: {"text": "a"}\n\ndata: {"error": {"message": "It broke."}}\n\ndata: [DONE]\n\n', ["a", "! It broke."]),
    ],
)
def test_a_stream_that_ends_badly_says_so(tab, stream, found):
    script = f"{STREAM_OF} return read(new TextEncoder().encode({json.dumps(stream)}), 1000);"
    assert run(tab, script) == found


def test_polling_slows_down_on_failures_and_ends_without_a_key(tab):
    script = f"""{POLLER}
    poller.start();
    const delays = [await turn(), await turn()];
    next = async () => {{ throw new ApiFailure("It broke."); }};
    for (let i = 0; i < 8; i += 1) delays.push(await turn());
    const failing = reports.at(-1);
    next = async () => {{}};
    delays.push(await turn());
    const live = queue.at(-1)[1];
    next = async () => {{ throw new ApiFailure("No key.", 401); }};
    await turn();
    const withoutKey = queue.length;
    hide(true); hide(false);
    const stillWithoutKey = queue.length;
    poller.start();
    return {{ delays, live, failing, withoutKey, stillWithoutKey, states: reports.map(([state]) => state),
             afterKey: queue.length }};
    """
    seen = run(tab, script)
    asked = [round(delay / 1000) for delay in seen["delays"]]
    assert asked == [0, 1, 1, 2, 4, 8, 16, 30, 30, 30, 30] and 900 < seen["live"] <= 1000
    assert seen["failing"] == ["failing", "It broke. Next try in 30 s."]
    assert seen["states"] == ["live"] * 2 + ["failing"] * 8 + ["live", "key", "hidden"]
    assert seen["withoutKey"] == seen["stillWithoutKey"] == 0 and seen["afterKey"] == 1


def test_a_hidden_tab_never_polls(tab):
    script = f"""{POLLER}
    poller.start();
    await turn();
    hide(true);
    const hidden = [queue.length, polls];
    poller.start();
    const started = queue.length;
    hide(false);
    const shown = queue.length;
    next = async () => hide(true);
    await turn();
    return {{ hidden, started, shown, duringPoll: queue.length, last: reports.at(-1)[0] }};
    """
    assert run(tab, script) == {"hidden": [0, 1], "started": 0, "shown": 1, "duringPoll": 0, "last": "hidden"}


def test_model_output_stays_text_and_tool_calls_are_put_together(tab):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": evil},
        {"content": evil},
        {"content": "more"},
        {"tool_calls": [{"index": 0, "id": "functions.a:0", "type": "function", "function": {"name": evil}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]},
        {"tool_calls": [{"index": 1, "id": "functions.b:1", "function": {"name": "b", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "<b>"}'}}]},
    ]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], "warnings": [evil]})
    script = f"""
    const {{ Answer }} = await import("/page/answer.js");
    const answer = new Answer({json.dumps(evil)});
    for (const chunk of {json.dumps(chunks)}) answer.push(chunk);
    answer.end({json.dumps(evil)});
    return {{ message: answer.message, tags: [...answer.node.querySelectorAll("*")].map((node) => node.localName),
             text: answer.node.textContent, open: answer.node.querySelector("details").open }};
    """
    seen = run(tab, script)
    assert not {"img", "script", "b"} & set(seen["tags"]) and "details" in seen["tags"]
    assert seen["text"].count(evil) == 6 and seen["open"] is False
    calls = [(call["id"], call["type"], call["function"]) for call in seen["message"]["tool_calls"]]
    assert calls == [
        ("functions.a:0", "function", {"name": evil, "arguments": '{"x": "<b>"}'}),
        ("functions.b:1", "function", {"name": "b", "arguments": "{}"}),
    ]
    assert seen["message"]["content"] == evil + "more" and seen["message"]["reasoning_content"] == evil


def stream_of(*deltas: dict, finish_reason: str) -> str:
    choices = [{"delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"delta": {}, "finish_reason": finish_reason})
    events = [json.dumps({"choices": [{"index": 0} | choice]}) for choice in choices]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])


def test_results_of_tool_calls_are_typed_in_and_sent_on(tab):
    def call(index: int, name: str) -> dict:
        function = {"name": name, "arguments": "{}"}
        return {"index": index, "id": f"functions.{name}:{index}", "type": "function", "function": function}

    answers = [
        stream_of({"tool_calls": [call(0, "a")]}, {"tool_calls": [call(1, "b")]}, finish_reason="tool_calls"),
        stream_of({"reasoning_content": "Why"}, {"content": "Done."}, finish_reason="stop"),
        stream_of({"content": "Bye."}, finish_reason="stop"),
    ]
    url = tab.run("location.origin")
    tab.open(f"{url}/")
    tab.until("document.getElementById('status').dataset.state === 'live'")
    tools = '[{"type": "function", "function": {"name": "a"}}]'
    run(
        tab,
        f"""const answers = {json.dumps(answers)}, ask = window.fetch;
        window.sent = [];
        window.fetch = async (path, options) => {{
          if (path !== "/v1/chat/completions") return ask(path, options);
          window.sent.push(JSON.parse(options.body));
          return new Response(answers.shift());
        }};
        document.getElementById("tools").value = {json.dumps(tools)};
        document.getElementById("system").value = "Be brief.";
        document.getElementById("max-tokens").value = "9";
        document.getElementById("thinking").checked = false;""",
    )
    is_done = "!document.querySelector('[aria-busy]')"
    labels = []
    for text in ("Go", "one", "two", "More"):
        tab.run("document.getElementById('message').focus()")
        labels.append(tab.run("document.getElementById('message-label').textContent"))
        tab.type(text, "Enter")
        tab.until(is_done)
    assert labels == ["Message", "Result of a", "Result of b", "Message"]
    first, second, third = tab.run("window.sent")
    shared = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9}
    shared |= {"tools": json.loads(tools), "chat_template_kwargs": {"thinking": False}}
    system, go = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go"}
    assert first == shared | {"messages": [system, go]}
    calls = [{key: value for key, value in call(i, name).items() if key != "index"} for i, name in enumerate("ab")]
    turns = [{"role": "assistant", "content": "", "tool_calls": calls}]
    turns.append({"role": "tool", "tool_call_id": "functions.a:0", "content": "one"})
    turns.append({"role": "tool", "tool_call_id": "functions.b:1", "content": "two"})
    assert second == shared | {"messages": [system, go, *turns]}
    turns.append({"role": "assistant", "content": "Done.", "reasoning_content": "Why"})
    assert third["messages"] == [system, go, *turns, {"role": "user", "content": "More"}]
