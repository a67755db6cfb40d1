"""What to do, in the order of what it brings."""

from __future__ import annotations

from engine.doctor.cliffs import CPU_CAUSES
from engine.doctor.findings import Findings
from engine.doctor.forecast import Forecast
from engine.doctor.links import Links
from engine.doctor.placement import Placement

SLOW_ROUND_SECONDS = 60e-6


def advice(
    links: Links,
    cliff_sentences: list[str],
    findings: Findings,
    placement: Placement,
    forecast: Forecast,
    is_gpu: bool,
    better_setting: str | None = None,
) -> list[str]:
    """Numbered by their place; the first one is worth most."""
    said = []
    if links.warnings():
        said.append(f"Mend the links first: {links.warnings()[0]}")
    if len(cliff_sentences) > 1 and cliff_sentences[-1] != CPU_CAUSES:
        said.append(f"Mend the cliff: {cliff_sentences[0]}")
    said += _slow_rounds(findings, placement, is_gpu)
    if better_setting is not None:
        said.append(better_setting)
    if placement.tp > 1:
        said.append(_dispatchers(findings, placement))
        said += _placement(placement)
    said.append(forecast.verdict())
    return said


def _slow_rounds(findings: Findings, placement: Placement, is_gpu: bool) -> list[str]:
    """A one-shot exchange of 16 kB takes under 20 us where links are as they should be."""
    fastest = findings.round_seconds().get(1, 0.0)
    if not is_gpu or placement.tp == 1 or fastest <= SLOW_ROUND_SECONDS:
        return []
    return [
        f"The fastest sum of one row takes {fastest * 1e6:.0f} us, where 6 (NVLink) to 20 (PCIe) are usual: peer "
        "access is staged through host memory (ForceP2P, IOMMU, ACS) or NCCL talks through it."
    ]


def _dispatchers(findings: Findings, placement: Placement) -> str:
    best, replicated = _spans(findings.winners(placement)), _spans(findings.replicated_winners(placement))
    text = f"Fastest rounds: {', '.join(best)}."
    if best != replicated:
        text += f" Of those that keep every row on every rank, which --moe-comm auto takes: {', '.join(replicated)}."
    return text


def _spans(winners: dict[int, str]) -> list[str]:
    """Neighbouring sizes with the same fastest dispatcher, in words."""
    spans: list[list] = []
    for rows, name in winners.items():
        if spans and spans[-1][2] == name:
            spans[-1][1] = rows
        else:
            spans.append([rows, rows, name])
    return [f"{name} for T={low}" + (f" to {high}" if high > low else "") for low, high, name in spans]


def _placement(placement: Placement) -> list[str]:
    whole = Placement(placement.config, placement.tp, placement.tp)
    if placement.config.n_routed_experts % placement.tp:
        return []
    few, many = whole.expert_penalty(1), whole.expert_penalty(64)
    return [
        f"Whole experts (--ep {placement.tp}) make the slowest rank read {few:.2f}x the routed bytes of slices at one "
        f"row and {many:.2f}x at 64: for one stream use a smaller --ep, for many requests they cost little."
    ]
