"""prometheus-client: /metrics parses, counts what was asked, and keeps the names that people chart."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families
from steps import SUM, Target, run

NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_ratio",
    "prefix_cache_hit_tokens",
    "prefix_cache_query_tokens",
    "prompt_tokens",
    "generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_finished",
    "num_preemptions",
    "request_rejected",
    "steps",
    "comm_rounds",
    "comm_bytes",
)


def families(target: Target) -> dict[str, object]:
    page = httpx.get(f"{target.url}/metrics", headers={"Authorization": f"Bearer {target.key}"}, trust_env=False)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/plain"), page
    return {family.name: family for family in text_string_to_metric_families(page.text)}


def total(found: dict, name: str) -> float:
    return sum(s.value for s in found[f"turnout_{name}"].samples if not s.name.endswith(("_created", "_bucket")))


def names(target: Target) -> str:
    """every charted name is there, each family with its help and type"""
    found = families(target)
    absent = [name for name in NAMES if f"turnout_{name}" not in found]
    assert not absent, absent
    assert all(family.documentation and family.type != "unknown" for family in found.values())
    return f"{len(found)} families"


def counts(target: Target) -> None:
    """one request adds its tokens to the counters"""
    before = families(target)
    body = {"model": target.model, "messages": SUM, "temperature": 0}
    headers = {"Authorization": f"Bearer {target.key}"}
    answer = httpx.post(f"{target.base}/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)
    usage, after = answer.json()["usage"], families(target)
    for name, key in (("prompt_tokens", "prompt_tokens"), ("generation_tokens", "completion_tokens")):
        assert total(after, name) - total(before, name) == usage[key], name
    assert total(after, "request_finished") - total(before, "request_finished") == 1


if __name__ == "__main__":
    run("prometheus-client", [names, counts])
