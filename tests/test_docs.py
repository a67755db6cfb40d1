"""What the documents say of flags, metrics, reasons and files is there."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.acceptance import GuessOutcome
from engine.draft_choice import CHOICE_CODES
from engine.server.app import MAX_BODY_BYTES
from engine.server.body import PAUSE_SECONDS, SLOWEST_RATE, START_SECONDS
from engine.server.fields import GRANTED, SILENT
from engine.server.limits import MAX_MESSAGES, MAX_TOKENIZED_BYTES, MAX_TOOLS, MAX_VALUES
from engine.server.metrics import PREFIX, EngineCollector, _speculation
from engine.server.output_parser import PARSE_ERRORS
from engine.server.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields
from engine.server.structured import READERS
from engine.stats import DraftChoiceStats, SpeculationStats
from serve import parse_arguments
from tests.engine.server.harness import make_core

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("draft/**/*.md"), *ROOT.glob("models/**/*.md")])
SERVING = (ROOT / "docs" / "serving.md").read_text()
SPECULATION = (ROOT / "docs" / "speculation.md").read_text()


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target}"


def test_every_reason_for_a_number_of_guesses_is_explained():
    table = SPECULATION.split("| `reason` |")[1].split("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == CHOICE_CODES


def test_every_metric_of_speculation_is_explained():
    counted = SpeculationStats(2)
    counted.observe(1, 2, 2, [GuessOutcome("a", verified=2, accepted=1, compared=2, matched=1)])
    snapshot = counted.snapshot({1: DraftChoiceStats(2, "gain", "")}, {1: {0: 0.1}})
    shown = {
        family.name.removeprefix(f"{PREFIX}spec_decode_")
        for family in _speculation(SimpleNamespace(speculation=snapshot))
    }
    table = SPECULATION.split("the prefix `turnout_spec_decode_`")[1].split("\n\n")[0]
    cells = "".join(re.findall(r"^\| (`.+?) \|", table, re.MULTILINE))
    named = {re.sub(r"(_total|_info)?(\{.*\})?$", "", name) for name in re.findall(r"`([^`]+)`", cells)}
    assert named == shown


def test_the_flags_of_speculation_are_those_of_the_server():
    options = ["--draft", "a/draft", "--num-draft-tokens", "5", "--no-adaptive-draft-tokens"]
    assert all(option in SPECULATION for option in options if option.startswith("--"))
    arguments = parse_arguments(options)
    assert (arguments.draft, arguments.num_draft_tokens, arguments.adaptive_draft_tokens) == ("a/draft", 5, False)


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose first line begins with `head`."""
    lines = page.split(head)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_settings_of_a_loaded_server_are_those_of_the_server():
    settings = re.search(r"^## Settings$(.*?)^## ", SERVING, re.MULTILINE | re.DOTALL)[1]
    flags = re.findall(r"^\| `(--[\w-]+)` \| ([^|]*) \|", settings, re.MULTILINE)
    assert len(flags) == len(re.findall(r"^\| `", settings, re.MULTILINE)), "no row is left out"
    table = dict(flags)
    assert set(table) == {
        *("--max-queued-requests", "--queue-timeout", "--request-timeout", "--drain-timeout"),
        *("--max-step-ms", "--enable-prefix-caching", "--kv-offload-gb"),
    }
    arguments = vars(parse_arguments([]))
    for flag, default in table.items():
        value = arguments[flag.strip("-").replace("-", "_")]
        expected = "on" if value is True else str(value).removesuffix(".0").lower()
        assert default.split(", ")[-1].removesuffix(" on a CPU") == expected, flag


def test_the_limits_of_a_request_are_those_of_the_server():
    table = {what: (limit, refusal) for what, limit, refusal in rows(SERVING, "| what |")}
    assert table["body"][0] == f"`--max-body-mb`, {vars(parse_arguments([]))['max_body_mb']} MiB"
    assert MAX_BODY_BYTES == 8 * 2**20
    for what, limit in (("values", MAX_VALUES), ("messages", MAX_MESSAGES), ("tools", MAX_TOOLS)):
        assert next(cell[0] for name, cell in table.items() if name.startswith(what)).startswith(f"{limit:,}")
    pause, start, rate = re.findall(r"\d[\d,]*", table["time that a body takes"][0])
    assert (float(pause), float(start)) == (PAUSE_SECONDS, START_SECONDS)
    assert int(rate.replace(",", "")) == SLOWEST_RATE
    assert f"{MAX_TOKENIZED_BYTES // 2**20} MiB" in SERVING.split("`/tokenize`")[1]


def test_the_metrics_of_a_loaded_server_are_there():
    stats = make_core().stats()
    rejected = {"queue_full": 0, "queue_timeout": 0, "draining": 0}
    families = EngineCollector(stats, None, rejected, dict.fromkeys(PARSE_ERRORS, 0)).collect()
    shown = {family.name: {label for s in family.samples for label in s.labels.values()} for family in families}
    for names, meaning in rows(SERVING, "| name |"):
        for name in re.findall(r"`([^`]+)`", names):
            whole = PREFIX + re.sub(r"\{.*\}$", "", name)
            family = whole if whole in shown else whole.removesuffix("_total")  # which a histogram's own name may have
            assert family in shown, name
            if "{reason}" in name:
                assert all(reason in meaning for reason in shown[family]), name


def test_every_refusal_of_a_loaded_server_is_explained():
    """Codes that the server's sources give to a 429, 503 or 504 are in the table, and no others."""
    sources = "".join(path.read_text() for path in (ROOT / "engine" / "server").glob("*.py"))
    given = set(re.findall(r'ApiError\((?:429|503|504), \w+, code=(?:"(\w+)"|(\w+))', sources))
    codes = {text or name.lower() for text, name in given} | {"too_many_answers"}
    assert {code.strip("`") for _, code, *_ in rows(SERVING, "| status |")} == codes


def test_every_field_of_a_request_is_explained():
    page = (ROOT / "docs" / "api.md").read_text()
    both, chats, completions, rest = re.split(r"^## (?:Chats|Completions|Structured output)$", page, flags=re.MULTILINE)

    def named(text):
        cells = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
        return {name.split(".")[0] for cell in cells for name in re.findall(r"`([^`]+)`", cell)}

    assert named(both) == {*SamplingFields.model_fields, *SILENT, *GRANTED}
    assert named(chats) == set(ChatCompletionRequest.model_fields) - set(SamplingFields.model_fields)
    assert named(completions) == set(CompletionRequest.model_fields) - set(SamplingFields.model_fields)
    assert all(f"`{field}" in rest for field in READERS)
