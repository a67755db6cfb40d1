"""From measurements to tables, sentences and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.config import ConfigError
from engine.doctor import report
from engine.doctor.advice import advice
from engine.doctor.cliffs import explain, find_cliffs
from engine.doctor.findings import Findings
from engine.doctor.forecast import Machine, anchored, forecast
from engine.doctor.links import Links
from engine.doctor.memory import memory_section
from engine.doctor.placement import Placement
from engine.doctor.report import Section
from engine.doctor.settings import Settings
from engine.doctor.settle import better_setting, sentences, settled_rows
from engine.doctor.team import Outcome


@dataclass
class Diagnosis:
    """Everything the doctor says; `data` is the JSON."""

    title: str
    sections: list[Section]
    data: dict[str, Any]
    findings: Findings
    placement: Placement

    def text(self) -> str:
        return "\n\n".join([self.title, *(section.text() for section in self.sections)])


def diagnose(
    settings: Settings,
    links: Links,
    findings: Findings,
    outcomes: Mapping[str, Outcome],
    plain_rate: float | None = None,
    is_quick: bool = False,
) -> Diagnosis:
    """Raises ConfigError for a plain rate that cannot be this machine's."""
    placement, is_gpu = Placement(settings.model_config(), settings.tp, settings.ep), settings.device == "cuda"
    machine = _machine(findings, placement, plain_rate)
    result = forecast(placement, machine)
    cliffs = _cliff_sentences(findings, placement, is_gpu or settings.simulate_link is not None)
    memory, memory_data = memory_section(settings, links.gpus[0]["memory"] if links.gpus else None)
    setting = better_setting(outcomes, settings.rows, findings.collectives.get("all-reduce", {}))
    said = advice(links, cliffs, findings, placement, result, is_gpu, setting)
    where = f"{settings.tp} rank{'s' * (settings.tp > 1)}, {placement.name}, on {settings.device}"
    sections = [
        report.machine_section(links, findings, settings),
        report.links_section(links),
        report.latency_section(findings, placement, settings.link()),
        Section("Size cliffs", [], cliffs) if settings.tp > 1 else None,
        _settled(settings, outcomes, is_quick),
        report.step_section(findings, settings, machine),
        report.forecast_section(result, machine, placement),
        memory,
        Section("Advice", [], [f"{number}. {text}" for number, text in enumerate(said, 1)]),
    ]
    data = {
        "settings": asdict(settings),
        "links": links.to_json(),
        **report.findings_json(findings, placement),
        "cliffs": cliffs,
        "settled": settled_rows(outcomes, settings.rows),
        "steps": sections[5].rows,
        "forecast": report.forecast_json(result) | {"inputs": asdict(machine)},
        "memory": memory_data,
        "advice": said,
    }
    title = f"Turnout's doctor: {where}"
    return Diagnosis(title, [one for one in sections if one is not None], data, findings, placement)


def _machine(findings: Findings, placement: Placement, plain_rate: float | None) -> Machine:
    machine = findings.machine(placement)
    if plain_rate is None:
        return machine
    try:
        return anchored(machine, placement, plain_rate)
    except ValueError as error:
        raise ConfigError(f"--plain-tok-s: {error}") from error


def _cliff_sentences(findings: Findings, placement: Placement, is_gpu_link: bool) -> list[str]:
    """Of every curve: collectives, and the rounds of a layer through each dispatcher."""
    row_bytes, layers = placement.config.hidden_size * 2, placement.verbs()[0]
    curves = dict(findings.collectives)
    for name, by_rows in findings.dispatchers.items():
        curves[f"{name}, a layer"] = {t: placement.comm_seconds(rounds) / layers for t, rounds in by_rows.items()}
    found = [cliff for name, curve in curves.items() for cliff in find_cliffs(name, curve, row_bytes)]
    return explain(found, is_gpu_link)


def _settled(settings: Settings, outcomes: Mapping[str, Outcome], is_quick: bool) -> Section | None:
    title = "NCCL settings, symmetric memory"
    if settings.device != "cuda":
        return Section(title, [], ["Ranks on processors: there is no NCCL and no peer memory here to settle."])
    if settings.tp == 1:
        return Section(title, [], ["One rank exchanges nothing, so there is nothing to settle."])
    if is_quick:
        return None
    notes = ["us of an all-reduce inside a CUDA graph, by rows; each setting with processes of its own."]
    return Section(title, settled_rows(outcomes, settings.rows), notes + sentences(outcomes, settings.rows))
