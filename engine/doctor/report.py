"""The doctor's tables for people, and the same figures for scripts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from engine.bench.report import format_table
from engine.doctor.findings import Findings
from engine.doctor.forecast import ACCEPT_LENGTHS, DRAFTS, Forecast, Machine, accepted
from engine.doctor.links import Links
from engine.doctor.placement import Placement, at_rows, placements

STEP_ROWS = (1, 4, 8, 64)


@dataclass
class Section:
    """A heading, a table where there is one, and sentences below it."""

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        parts = [f"{self.title}\n{'-' * len(self.title)}"]
        if self.rows:
            parts.append(format_table(self.rows))
        return "\n".join([*parts, *self.notes])


def machine_section(links: Links, findings: Findings, settings: Any) -> Section:
    notes = [", ".join(f"{name} {value}" for name, value in links.versions.items())]
    if settings.device == "cuda":
        for gpu in links.gpus[: settings.tp]:
            notes.append(
                f"{gpu['name']}, {gpu['memory'] / 1e9:.0f} GB, compute capability {gpu['capability']}, "
                f"{gpu['processors']} processors"
            )
        notes = list(dict.fromkeys(notes))
        notes[1:1] = [f"{settings.tp} GPUs measured:"]
    else:
        notes.append(f"{settings.tp} ranks on processors, over gloo.")
    said = ", ".join(f"{name}={value}" for name, value in links.settings.items())
    notes.append(f"Settings that matter: {said}." if said else "No NCCL or CUDA setting in the environment.")
    if findings.read_rates:
        slow, fast = min(findings.read_rates) / 1e9, max(findings.read_rates) / 1e9
        notes.append(f"Streaming read, all ranks at once: {slow:.0f} GB/s on the slowest, {fast:.0f} on the fastest.")
    return Section("Machine", [], notes)


def links_section(links: Links) -> Section | None:
    if not links.pairs:
        return None
    rows = [
        {
            "from": pair.source,
            "to": pair.target,
            "link": pair.link,
            "peer access": pair.peer,
            "GB/s": None if pair.bytes_per_second is None else pair.bytes_per_second / 1e9,
            "16 kB us": None if pair.small_seconds is None else pair.small_seconds * 1e6,
            "read us": None if pair.load_seconds is None else pair.load_seconds * 1e6,
        }
        for pair in links.pairs
    ]
    notes = links.warnings() or ["Peer access is real on every pair: nothing looks staged through host memory."]
    notes.append("16 kB us: a copy until the host sees its end. read us: one read of the peer's memory by a kernel.")
    return Section("Links", rows, notes)


def latency_section(findings: Findings, placement: Placement, link: Any) -> Section:
    """Microseconds by rows: collectives, then a layer's rounds of every dispatcher, the fastest one marked."""
    winners = findings.winners(placement)
    rows = []
    for t in findings.sizes():
        row: dict[str, Any] = {"T": t, "kB": t * placement.config.hidden_size * 2 / 1e3}
        row |= {name: by_rows[t] * 1e6 for name, by_rows in findings.collectives.items()}
        for name, by_rows in findings.dispatchers.items():
            row[name] = None if t not in by_rows else placement.comm_seconds(by_rows[t]) / placement.verbs()[0] * 1e6
        rows.append(row | {"fastest": winners[t]})
    notes = [
        "us. Collectives: one call. Dispatchers: the rounds of a layer (reduce + dispatch + combine, norms included), "
        "a step's over its layers. Median of the slowest rank; on GPUs inside a CUDA graph.",
        *(f"{name}: no figure: {reason}." for name, reason in findings.refused.items()),
    ]
    if link is not None:
        notes.append(f"SIMULATED LINK: {link}; these are not this machine's own figures.")
    return Section("Latency", rows, notes)


def step_section(findings: Findings, settings: Any, machine: Machine) -> Section:
    """Rounds, bytes and time of a step for each placement of the experts."""
    rows = []
    for placement in placements(placement_config(settings), settings.tp):
        winners = findings.replicated_winners(placement)
        for t in (t for t in STEP_ROWS if t in winners):
            rounds = findings.dispatchers[winners[t]][t]
            comm = placement.comm_seconds(rounds) if settings.tp > 1 else 0.0
            read = placement.bytes_read(t, machine.context, t)
            kernels = read / machine.read_bytes_per_second / machine.efficiency.at(t)
            rows.append(
                {
                    "experts": placement.name,
                    "T": t,
                    "rounds": placement.num_rounds(rounds),
                    "through": winners[t],
                    "sent MB": placement.comm_bytes(rounds) / 1e6,
                    "rounds us": comm * 1e6,
                    "read GB": read / 1e9,
                    "expert bytes": placement.expert_penalty(t),
                    "step ms": (kernels + comm) * 1e3,
                }
            )
    reduces, dispatches, combines = Placement(placement_config(settings), settings.tp, settings.ep).verbs()
    notes = [
        f"A step: {reduces} attention reduces, {dispatches} dispatches, {combines} combines; rounds: those that carry "
        f"bytes. step ms is modelled: "
        f"bytes of the slowest rank over the read rate and the kernels' efficiency, plus the rounds; T requests at "
        f"{machine.context} tokens.",
        "expert bytes: what the slowest rank reads of routed experts over slices on all ranks, uniform routing.",
        f"Rounds were measured with --ep {settings.ep}; only dispatchers that shard tokens depend on it. "
        "Those are left out here: with them a rank reads the whole shared expert too.",
    ]
    return Section("A step of the model", rows, notes)


def placement_config(settings: Any) -> Any:
    return settings.model_config()


def forecast_section(result: Forecast, machine: Machine, placement: Placement) -> Section:
    rows = [{"drafts": 0, "step ms": result.plain.seconds * 1e3, "rounds ms": result.plain.comm * 1e3}]
    rows[0] |= {f"tok/s at {length}": result.plain_rate for length in ACCEPT_LENGTHS}
    for k in DRAFTS:
        row = {"drafts": k, "step ms": result.iteration(k) * 1e3}
        row["rounds ms"] = (result.verify[k].comm + result.draft[k].comm) * 1e3
        rows.append(row | {f"tok/s at {length}": result.rate(k, length) for length in ACCEPT_LENGTHS})
    kept = "; ".join(
        f"{length}: " + ", ".join(f"{accepted(length, k):.2f}" for k in DRAFTS) for length in ACCEPT_LENGTHS
    )
    notes = [
        result.verdict(),
        "One request. Accept lengths are those of 3 drafts; 1, 2 and 3 drafts accepted alike keep " + kept + ".",
        f"Inputs: read {machine.read_bytes_per_second / 1e9:.0f} GB/s; kernels reach "
        f"{machine.efficiency.at(1):.2f} of the byte roofline at 1 row and {machine.efficiency.at(4):.2f} at 4: "
        f"{machine.efficiency.source}; rounds {at_rows(machine.comm_seconds, 1) * 1e3:,.2f} ms a step at 1 row and "
        f"{at_rows(machine.comm_seconds, 4) * 1e3:,.2f} at 4.",
    ]
    return Section(f"Forecast with an EAGLE-3 draft, experts {placement.name}", rows, notes)


def forecast_json(result: Forecast) -> dict[str, Any]:
    return {
        "plain_tokens_per_second": result.plain_rate,
        "speculative": [
            {
                "drafts": k,
                "accept_length": length,
                "tokens_per_second": result.rate(k, length),
                "gain": result.rate(k, length) / result.plain_rate,
            }
            for k in DRAFTS
            for length in ACCEPT_LENGTHS
        ],
        "break_even_accept_length": result.break_even(),
        "verdict": result.verdict(),
    }


def findings_json(findings: Findings, placement: Placement) -> dict[str, Any]:
    return asdict(findings) | {"fastest": findings.winners(placement)}
