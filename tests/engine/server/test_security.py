"""What a request must never reach: code, files, other hosts, the template's insides, or everybody's time."""

import base64
import json
import pickle
import socket
import threading
import time

import httpx
import pytest

from tests.engine.server.harness import HI, emit, error_of, make_core, paths_of, read_stream, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BLOW_UP = "(a+)+$", "a" * 30 + "!"


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile", "/v1/start_profile", "/profile"])
@pytest.mark.parametrize("folder", ["../../tmp/x", "/etc/x", "link"])
def test_b173_there_is_no_profile_to_write(server, tmp_path, path, folder):
    """A route that would write where a request says is not there at all."""
    target = tmp_path / "target"
    (tmp_path / "link").symlink_to(target)
    with server.http() as http:
        for name in (folder, str(tmp_path / "link")):
            error_of(http.post(path, json={"output_dir": name}), 404)
            error_of(http.get(path, params={"output_dir": name}), 404)
    assert not target.exists() and not any("profile" in path for path in paths_of(server.app.routes))


class Marker:
    """Unpickling it would make a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize(
    "field",
    [
        *("custom_logit_processor", "logits_processors", "logits_processor", "custom_params", "prompt_embeds"),
        *("input_embeds", "lora_path", "kv_transfer_params", "vllm_xargs", "nonsense"),
    ],
)
def test_b174_nothing_of_a_request_is_unpickled(server, tmp_path, field):
    """Known ones are refused, the rest is ignored with a warning."""
    marker = tmp_path / "made"
    raw = pickle.dumps(Marker(marker))
    pickle.loads(raw).close()
    assert marker.exists(), "the payload works"
    marker.unlink()
    for value in (base64.b64encode(raw).decode(), raw.decode("latin-1"), {"callable": raw.hex()}, [raw.hex()]):
        for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "a"})):
            answer = server.post(path, body | {field: value})
            assert answer.status_code in (200, 400)
            said = answer.json()["warnings"][0] if answer.status_code == 200 else answer.json()["error"]["message"]
            assert field in said
    with server.http(headers={"content-type": "application/json"}) as http:
        error_of(http.post(CHAT, content=raw), 400)
        error_of(http.post(CHAT, content=raw, headers={"content-type": "application/octet-stream"}), 415)
    assert not marker.exists() and server.client.is_healthy


@pytest.fixture
def stranger():
    """A port that nobody may connect to: (its number, a function that says whether somebody did)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)

        def was_called() -> bool:
            try:
                listener.accept()
            except BlockingIOError:
                return False
            return True

        yield listener.getsockname()[1], was_called


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url", "input_audio", "file"])
def test_b175_no_url_and_no_file_of_a_message_is_read(server, stranger, kind):
    port, was_called = stranger
    urls = [
        "file:///etc/hostname",
        f"http://127.0.0.1:{port}/",
        "http://169.254.169.254/latest/",
        f"//127.0.0.1:{port}",
    ]
    urls += [
        f"ftp://127.0.0.1:{port}/a",
        "data:image/png;base64," + "A" * 2**20,
        "/etc/hostname",
        f"//127.0.0.1:{port}",
        "",
    ]
    for url in urls:
        for part in ({"type": kind, kind: {"url": url}}, {"type": kind, kind: url}, {"type": kind, "url": url}):
            for path in (CHAT, "/tokenize", f"{CHAT}/render"):
                error = server.refusal(path, {"messages": [{"role": "user", "content": [part]}]})
                assert error["param"].startswith("messages[0].content[0]") and len(error["message"]) < 500
    assert not was_called() and not server.core.requests


def test_b175_a_data_url_that_is_too_large_is_not_even_read(server):
    """A gigabyte is announced: the answer comes before it is sent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as peer:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {2**30}\r\n\r\n"
        peer.sendall(head.encode() + b'{"messages": [{"role": "user", "content": [{"image_url": {"url": "data:')
        assert b" 413 " in peer.recv(1000)


@pytest.mark.parametrize(
    "kwargs",
    [
        *({"tokenize": True}, {"tokenize": False}, {"messages": []}, {"tools": 1}, {"tools": []}, {"nope": 1}),
        *({"add_generation_prompt": False}, {"conversation": []}, {"chat_template": "{{ 1 }}"}, {"return_dict": True}),
        *({"tools_ts_str": "x"}, {"bos_token": "<|im_end|>"}, {"__class__": 1}, {"namespace": 1}, {"thinking": "no"}),
    ],
)
def test_b177_only_switches_of_the_template_pass(server, kwargs):
    """Others are a 400 that names the field: the prompt cannot become another one."""
    for path in (CHAT, "/tokenize", f"{CHAT}/render"):
        error = server.refusal(path, {"messages": HI, "chat_template_kwargs": kwargs})
        assert error["param"].startswith("chat_template_kwargs")
    plain = server.post("/tokenize", {"messages": HI}).json()["tokens"]
    same = server.post("/tokenize", {"messages": HI, "chat_template_kwargs": {"thinking": True}}).json()["tokens"]
    assert plain == same and not server.core.requests


class HealthWatch:
    """Asks for /health over and over; `slowest` is the longest that an answer took, in seconds."""

    def __init__(self, url: str):
        self._url, self._done = url, threading.Event()
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as http:
            while not self._done.is_set() or not self.times:
                began = time.monotonic()
                assert http.get("/health").status_code == 200
                self.times.append(time.monotonic() - began)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join(60)

    @property
    def usual(self) -> float:
        return sorted(self.times)[int(0.9 * (len(self.times) - 1))]


@pytest.mark.parametrize("where", ["message", "prompt", "stop", "name", "regex", "schema", "type", "id"])
def test_b181_patterns_in_a_request_take_linear_time(server, where):
    """What makes backtracking matchers run for years, wherever a request may hold text."""
    pattern, text = BLOW_UP
    text = text * 300
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": schema}}
    path, fields = {
        "message": (CHAT, {"messages": [{"role": "user", "content": text + pattern}]}),
        "prompt": (COMPLETIONS, {"prompt": text}),
        "stop": (CHAT, {"stop": [pattern, BLOW_UP[1], "a" * 999 + "!", "b"]}),
        "name": (CHAT, {"tools": [tool | {"function": {"name": text}}]}),
        "regex": (CHAT, {"structured_outputs": {"regex": pattern}}),
        "schema": (CHAT, {"tools": [tool], "response_format": {"type": "json_schema", "json_schema": schema}}),
        "type": (CHAT, {"messages": [{"role": "user", "content": [{"type": text, "text": text}]}]}),
        "id": (CHAT, {"request_id": text}),
    }[where]
    began = time.monotonic()
    with HealthWatch(server.url) as watch:
        answer = server.post(path, {"messages": HI} | fields)
    assert answer.status_code in (200, 400), answer.text
    assert time.monotonic() - began < 20 and watch.usual < 2, "exponential time would be years"


@pytest.mark.parametrize("piece", ["<|tool_call", "<thin", "</think", "<|tool_calls_section_begin|", "a" * 30 + "!"])
def test_b181_half_open_markers_in_an_answer_take_linear_time(piece):
    """200 KB of them in ordinary tokens, with a stop string that they begin, while /health answers."""
    text = piece * (200_000 // len(piece))
    script = emit("</think>") + [token for letter in piece for token in emit(letter)] * (200_000 // len(piece))
    core = make_core(max_model_len=10**6, default_script=script, tokens_per_step=4000)
    with serving(core) as server, HealthWatch(server.url) as watch:
        began = time.monotonic()
        data = read_stream(server.post(CHAT, {"messages": HI, "stream": True, "stop": [piece[:3] * 9 + "never"]}))
        seconds = time.monotonic() - began
        assert data[-1] == "[DONE]"
        deltas = [json.loads(item)["choices"][0]["delta"] for item in data[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas) == text, "markers in plain text are text"
    assert seconds < 20 and watch.usual < 2
