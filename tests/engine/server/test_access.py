"""Who gets in: API keys on every route, keys from a file, web pages, HEAD, and what is refused at start."""

import os
import re
import socket
import ssl

import httpx
import pytest

import serve
from engine import log
from engine.server import page
from engine.server.middleware import OPEN_PATHS
from tests.checkpoints import SMALL, build_checkpoint
from tests.engine.server.harness import HI, error_of, paths_of, serving
from tests.processes import PYTHON, running

CERTIFICATE = "tests/engine/server/loopback.pem"  # of 127.0.0.1, with its key, until 2126
CHAT, PAGE = "/v1/chat/completions", "https://chat.example.com"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "FOO")
SPELLINGS = """
    //v1/models /v1//models /v1/../v1/models /./v1/models /V1/models /v1%2fmodels /v1%2Fmodels /%761/models /v1/models/
    /v1/models?x=/health /v1/models#/health /health/ /health/. /health/../v1/models /Health /%68ealth //health
    /health%00 /health;/v1/models /health?/../v1/models /health%2f..%2fv1/models // /? /. /%2f *
    http://127.0.0.1/v1/models http://127.0.0.1/health/../v1/models
"""
REALLY_OPEN = ("/health?/../v1/models", "/?")  # a query changes nothing


@pytest.fixture(scope="module")
def guarded():
    with serving(api_keys=["first", "second"], allow_origins=[PAGE]) as server:
        yield server


def status_of(port: int, method: str, target: str, headers: str = "") -> int:
    """Of a request whose target goes out exactly as written."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as peer:
        peer.sendall(f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n".encode())
        answer = peer.makefile("rb").read()
    return int(answer.split(b" ", 2)[1])


def all_paths(server) -> list[str]:
    """Of every route that the app has, FastAPI's own included."""
    with server.http(headers={"authorization": "Bearer first"}) as http:
        documented = list(http.get("/openapi.json").json()["paths"])
    paths = {re.sub(r"\{.*?\}", "tiny", path) for path in paths_of(server.app.routes)}
    assert paths >= {re.sub(r"\{.*?\}", "tiny", path) for path in documented}
    return sorted(paths)


def test_b170_every_route_asks_for_a_key(guarded):
    paths = all_paths(guarded)
    assert len(paths) > 20 and {"/docs", "/openapi.json", CHAT, "/metrics"} < set(paths)
    for path in [*paths, "/nope", "/start_profile"]:
        for method in METHODS:
            is_open = path.encode() in OPEN_PATHS and method in ("GET", "HEAD")
            assert (status_of(guarded.port, method, path) == 401) != is_open, (method, path)
    assert {path.decode() for path in OPEN_PATHS} == {"/health", *page.ROUTES}, "and nothing else"


@pytest.mark.parametrize("target", SPELLINGS.split())
def test_b170_no_spelling_gets_around_the_key(guarded, target):
    for method in ("GET", "HEAD", "POST"):
        status = status_of(guarded.port, method, target)
        if target in REALLY_OPEN and method != "POST":
            assert status in (200, 404)
        else:
            assert status in (400, 401), (method, target)
    assert status_of(guarded.port, "GET", "/v1/models", "Authorization: Bearer second\r\n") == 200


def test_b170_no_header_gets_around_the_key(guarded):
    for header in ("X-Original-URL: /health", "X-Rewrite-URL: /health", "X-Forwarded-Prefix: /health",
                   "X-HTTP-Method-Override: HEAD", "X-Api-Key: first", "Cookie: authorization=first",
                   "Authorization: Bearer first\x00", "Authorization: Bearer"):  # fmt: skip
        assert status_of(guarded.port, "GET", "/v1/models", f"{header}\r\n") in (400, 401), header
    upgrade = "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    assert status_of(guarded.port, "GET", "/v1/models", f"{upgrade}Connection: Upgrade\r\n") in (400, 401)


def test_head_is_get_without_a_body(guarded):
    with guarded.http() as http:
        whole, head = http.get("/health"), http.head("/health")
        assert head.status_code == 200 and head.content == b""
        assert head.headers["content-length"] == whole.headers["content-length"]
        http.headers["authorization"] = "Bearer first"
        for path in ("/v1/models", "/metrics", "/version", "/docs", "/openapi.json"):
            assert http.head(path).status_code == 200, path
        assert http.head(CHAT).status_code == 405 and http.head("/nope").status_code == 404


def test_pages_from_an_allowed_origin_may_call(guarded):
    """The browser's question comes without the key; the call itself carries it."""
    asked = {"origin": PAGE, "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type,x-stainless-os"
    with guarded.http() as http:
        answer = http.options(CHAT, headers=asked)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"].lower()
        refused = http.post(CHAT, json={"messages": HI}, headers={"origin": PAGE})
        assert error_of(refused, 401) and refused.headers["access-control-allow-origin"] == PAGE
        key = {"authorization": "Bearer first"}
        served = http.post(CHAT, json={"messages": HI}, headers=key | {"origin": PAGE})
        assert served.status_code == 200 and served.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in served.headers["access-control-expose-headers"]
        for other in ("https://evil.example.com", "null", "http://chat.example.com", PAGE + ".evil.com"):
            assert http.options(CHAT, headers=asked | {"origin": other}).status_code == 400
            answer = http.get("/health", headers={"origin": other})
            assert "access-control-allow-origin" not in answer.headers
        assert not any("credentials" in name for name in served.headers)


def test_pages_from_elsewhere_may_not_by_default():
    with serving() as server, server.http() as http:
        asked = {"origin": PAGE, "access-control-request-method": "POST"}
        answers = [http.options(CHAT, headers=asked), http.get("/health", headers=asked)]
    assert [answer.status_code for answer in answers] == [405, 200]
    assert not any(name.startswith("access-control") for answer in answers for name in answer.headers)


def test_keys_certificate_and_settings_reach_a_real_server(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("\n  key-of-ann  \nkey-of-bob\n\n")
    options = ["--api-key-file", str(keys), "--api-key", "key-of-cas", "--ssl-certfile", CERTIFICATE]
    options += ["--allow-origin", PAGE, "--max-body-mb", "1", "--sse-keep-alive", "0", "--log-level", "debug"]
    model = str(build_checkpoint(tmp_path / "small", SMALL))
    command = [*PYTHON, "serve.py", "--port", "0", "--device", "cpu", "--num-threads", "1", "--model", model, *options]
    with running(command, tmp_path) as program:
        url = program.expect(r"serving \S+ on (https://127\.0\.0\.1:\d+)")[1]
        context = ssl.create_default_context(cafile=CERTIFICATE)
        with httpx.Client(base_url=url, verify=context, trust_env=False, timeout=60) as http:
            assert http.head("/health").status_code == 200
            assert http.get("/v1/models").status_code == 401
            for key in ("key-of-ann", "key-of-bob", "key-of-cas"):
                http.headers["authorization"] = f"Bearer {key}"
                assert http.get("/v1/models", headers={"origin": PAGE}).headers["access-control-allow-origin"] == PAGE
            assert http.post("/tokenize", json={"prompt": "a" * 2**20}).status_code == 413
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http") + "/health", trust_env=False)
        with open(f"/proc/{program.process.pid}/cmdline") as line:
            assert "key-of-ann" not in line.read()
        assert "key-of" not in program.output


@pytest.fixture
def start(monkeypatch, capsys):
    """Runs serve.py up to where it would load; returns the exit code and what it said."""

    def stop(*_args, **_options):
        raise AssertionError("loading began")

    monkeypatch.setattr("engine.launch.start_engine", stop)
    before = log.logger.handlers[:], log.logger.level, log.logger.propagate

    def run(*options: str) -> tuple[int, str]:
        try:
            code = serve.main(["--port", "0", "--device", "cpu", *options])
        except SystemExit as error:
            code = error.code
        except AssertionError:
            code = 0
        return code, capsys.readouterr().err

    yield run
    log.logger.handlers[:], log.logger.level, log.logger.propagate = before


@pytest.mark.parametrize(
    ("contents", "word"),
    [
        (b"", "holds no key"),
        (b"\n  \n\t\n", "holds no key"),
        (b"good\nsecr\xc3\xa9t\n", "line 2"),
        (b"good\x00key\n", "line 1"),
        (b"k" * (2**20 + 1), "larger"),
        (None, "cannot be read"),
    ],
)
def test_b180_a_key_file_without_good_keys_is_refused(start, tmp_path, contents, word):
    path = tmp_path / "keys"
    if contents is not None:
        path.write_bytes(contents)
    code, said = start("--api-key-file", str(path))
    assert code == 2 and said.startswith("serve.py: --api-key-file") and word in said and len(said.splitlines()) == 1
    assert "secr" not in said and "good" not in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api-key", ""], ["--api-key is empty"]),
        (["--api-key", " \t"], ["--api-key is empty"]),
        (["--api-key-file", "/"], ["--api-key-file", "cannot be read"]),
        (["--api-key-file", "a\0b"], ["--api-key-file", "cannot be read"]),
        (["--ssl-keyfile", CERTIFICATE], ["--ssl-certfile"]),
        (["--ssl-certfile", "no/such.pem"], ["--ssl-certfile", "no/such.pem"]),
        (["--ssl-certfile", CERTIFICATE, "--ssl-keyfile", "no/key.pem"], ["--ssl-keyfile", "no/key.pem"]),
        (["--ssl-certfile", "pyproject.toml"], ["pyproject.toml", "cannot be used"]),
        (["--allow-origin", "chat.example.com"], ["--allow-origin", "chat.example.com"]),
        (["--allow-origin", PAGE + "/"], ["--allow-origin"]),
        (["--allow-origin", "https://a:b@c"], ["--allow-origin"]),
        (["--allow-origin", "https://a:port"], ["--allow-origin"]),
        (["--max-body-mb", "0"], ["--max-body-mb"]),
        (["--max-body-mb", "lots"], ["--max-body-mb"]),
        (["--sse-keep-alive", "-1"], ["--sse-keep-alive"]),
        (["--sse-keep-alive", "nan"], ["--sse-keep-alive"]),
    ],
)  # fmt: skip
def test_b180_senseless_settings_are_refused_before_loading(start, options, words):
    code, said = start(*options)
    assert code == 2 and all(word in said.splitlines()[-1] for word in words), said


def test_b180_no_key_is_built_in_and_a_public_address_without_one_warns(start, tmp_path):
    with serving() as server, server.http() as http:
        for headers in ({}, {"authorization": "Bearer anything"}):
            assert http.get("/v1/models", headers=headers).status_code == 200, "without a key all are let in"
    (tmp_path / "keys").write_text("mine\n")
    for host, key, warns in (("0.0.0.0", [], True), ("::", [], True), ("127.0.0.1", [], False),
                             ("0.0.0.0", ["--api-key", "mine"], False),
                             ("0.0.0.0", ["--api-key-file", str(tmp_path / "keys")], False)):  # fmt: skip
        code, said = start("--host", host, *key)
        assert code == 0 and ("anyone who can reach it" in said) == warns, (host, key, said)
        assert "mine" not in said


def test_a_key_file_that_may_not_be_read(start, tmp_path):
    path = tmp_path / "keys"
    path.write_text("k\n")
    path.chmod(0)
    code, said = start("--api-key-file", str(path))
    assert code == (0 if os.access(path, os.R_OK) else 2) and (code == 0 or "cannot be read" in said), "root reads all"


@pytest.mark.parametrize("origins", [["*"], ["http://localhost:3000", "https://a.example"], ["app://desktop"]])
def test_origins_that_make_sense(origins):
    from engine.server.access import check_origins

    assert check_origins(origins) == tuple(origins)
