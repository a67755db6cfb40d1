"""The page at `/`: its routes, headers and key rules, and that what its scripts read exists."""

from __future__ import annotations

import http.client
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import engine.server.page as page
from engine.config import EngineConfig
from engine.launch import start_engine
from tests.engine.server.harness import serving

FOLDER = Path(page.__file__).parent / "page"
NO_PAGES = ["/page", "/page/", "/page/index.html", "/page/nope.js", "/page/../page.py", "/page/..%2fpage.py"]
NO_PAGES += ["/page/page.js/", "/page//page.js", "/page/%2e%2e/app.py", "/page/page.js%00", "//", "/page/PAGE.js"]
NO_PAGES += ["/index.html", "/./", "/page/../"]
METRIC = re.compile(r"\bturnout_\w+")


def source(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", page.ROUTES)
def test_a_file_of_the_page(server, path):
    name = page.ROUTES[path]
    with server.http() as client:
        response, head = client.get(path), client.head(path)
        again = client.get(path, headers={"if-none-match": f'W/"other", {response.headers["etag"]}'})
        changed = client.get(path, headers={"if-none-match": '"other"'})
    assert response.status_code == 200 and response.content == (FOLDER / name).read_bytes()
    kind = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert response.headers["content-type"].split(";")[0] == kind[Path(name).suffix]
    assert response.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    assert head.status_code == 200 and head.content == b"" and head.headers["etag"] == response.headers["etag"]
    assert again.status_code == 304 and again.content == b""
    assert changed.status_code == 200


def statuses(server, method: str, paths: list[str], **headers: str) -> set[int]:
    """Of paths sent to the letter; httpx would resolve their dots."""
    found = set()
    for path in paths:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request(method, path, headers=headers)
        found.add(connection.getresponse().status)
        connection.close()
    return found


def test_every_file_is_served_and_nothing_else(server):
    assert set(page.ROUTES.values()) == {file.name for file in FOLDER.iterdir()}
    assert statuses(server, "GET", NO_PAGES) == {404}
    assert statuses(server, "POST", ["/", "/page/page.js"]) == statuses(server, "DELETE", ["/"]) == {405}
    with server.http() as client:
        shown = client.get("/openapi.json").json()["paths"]
    assert "/load" in shown and not any(path.startswith("/page") or path == "/" for path in shown)


def test_only_the_page_and_health_need_no_key():
    asks = [*NO_PAGES, "/metrics", "/load", "/expert_load", "/v1/models", "/page/../metrics"]
    with serving(api_keys=["k"]) as server:
        assert statuses(server, "GET", [*page.ROUTES, "/health", "/?q=1"]) == {200}
        assert statuses(server, "GET", asks) == {401}
        assert statuses(server, "GET", ["/metrics"], authorization="Bearer k") == {200}


def test_the_page_asks_nobody_else_and_holds_no_code_in_its_markup():
    for file in FOLDER.iterdir():
        text = file.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|url\(|@import|(?:src|href)=\"//", text), file.name
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "localStorage",
            "cookie",
        ):
            assert word not in text, (file.name, word)
    markup = source("index.html")
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", markup)
    assert re.findall(r"<script[^>]*>(.*?)</script>", markup, re.S) == [""]
    assert set(re.findall(r'(?:src|href)="([^"]*)"', markup)) <= set(page.ROUTES)


def test_every_id_that_a_script_looks_up_is_in_the_markup():
    ids = set(re.findall(r'\bid="([^"]+)"', source("index.html")))
    used = {name for module in page.MODULES for name in re.findall(r'(?:byId|setText|say)\("([\w-]+)"', source(module))}
    assert len(used) > 40 and used <= ids, used - ids


def test_every_metric_that_the_page_reads_is_in_metrics(monkeypatch):
    names = set(METRIC.findall(source("names.js")))
    elsewhere = {file.name: METRIC.findall(file.read_text(encoding="utf-8")) for file in FOLDER.iterdir()}
    assert len(names) > 8 and not any(found for name, found in elsewhere.items() if name != "names.js")
    core, _ = start_engine(EngineConfig(device="cpu", num_threads=1, max_model_len=256, draft="auto"))
    stats = core.stats
    # One rank waits for nobody, so nothing is timed; several would have this family.
    monkeypatch.setattr(core, "stats", lambda: replace(stats(), comm_seconds={"other": 0.5}))
    with serving(core) as server:
        server.chat(max_tokens=24, temperature=0, ignore_eos=True)
        found = list(text_string_to_metric_families(server.http().get("/metrics").text))
        shapes = {"load": server.http().get("/load").json(), "experts": server.http().get("/expert_load").json()}
    samples = {sample.name for family in found for sample in family.samples}
    histograms = {family.name for family in found if family.type == "histogram"}
    assert names <= samples | histograms, names - samples - histograms
    for key in re.findall(r"\bload\.(\w+)", source("panels.js")):
        assert key in shapes["load"]
    for key in re.findall(r"\bload\.(\w+)", source("experts.js")):
        assert key in shapes["experts"]
