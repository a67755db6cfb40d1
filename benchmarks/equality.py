"""Speculation changes no token: greedy answers with drafts of every kind against plain decoding, token by token.

    python benchmarks/equality.py --json FILE                  # the CPU in float32, where no token may differ
    python benchmarks/equality.py --device cuda --json FILE    # bfloat16: a differing token must be a near-tie

Drafts: the trained one, one of random weights, one that is always wrong and one that is always right. Requests come in
waves of 1 to 64; some arrive while others decode, some are aborted, prompts are computed in chunks. Where an answer
first differs, a plain engine scores both tokens behind the text before; the gap of their logprobs must be below GAP.
Exit code 1 if an answer differs otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.bench.report import environment, format_table
from engine.bench.spec_text import PROMPTS, read_prompts
from engine.config import KV_CACHE_DTYPES, TINY_CHECKPOINT, EngineConfig
from engine.core import EngineCore
from engine.launch import start_engine
from engine.model_files import ModelFiles
from engine.sampling_params import SamplingParams
from tests.drafts import write_draft
from tests.scripted_drafts import build, right, wrong

SCRIPTS = {"wrong": wrong, "right": right}
WAVES = (1, 64, 2, 3, 5, 8, 16, 33, 4, 7)
CHUNK = 96  # tokens a step: a wave of 64 decodes in it, with few guesses and a piece of a prompt
GAP = 0.25  # of two logprobs in bfloat16, whose values are rounded to 2^-8 of their size
_CACHE_GB, _SCORED = 0.5, 20


@dataclass(frozen=True)
class Setting:
    """An engine with a draft. adaptive: as many guesses as pay; else always num_guesses."""

    draft: str
    num_guesses: int = 3
    adaptive: bool = False
    budget: int = 2048
    world: int = 1


SETTINGS = (
    Setting("trained", adaptive=True),
    Setting("trained", 4, budget=CHUNK),
    Setting("random", 3),
    Setting("random", 1, budget=CHUNK),
    Setting("wrong", 2),
    Setting("wrong", 5, budget=CHUNK),
    Setting("right", 7),
    Setting("right", 3, budget=CHUNK),
)


@dataclass
class Asked:
    """A request: arrives so many steps after its wave, and is aborted so many steps after that, if ever."""

    prompt: list[int]
    max_tokens: int
    arrives: int = 0
    aborted: int | None = None
    ignore_eos: bool = True


@dataclass(frozen=True)
class Difference:
    """Of answer `index`: the first token that is not the plain one's; gap: of their logprobs, None if not scored."""

    index: int
    place: int
    plain: int | None
    found: int | None
    gap: float | None = None


def requests(count: int, most_tokens: int, vocabulary: int, seed: int = 0) -> list[Asked]:
    """Two of three from held-out texts where the vocabulary is theirs, the others random tokens."""
    rng = random.Random(seed)
    texts = [ids for group in read_prompts(PROMPTS, 99).values() for ids in group]
    texts = texts if max(map(max, texts)) < vocabulary else []
    asked = []
    for index in range(count):
        prompt = list(rng.choice(texts)) if texts and index % 3 else []
        prompt = prompt or [rng.randrange(vocabulary - 64) for _ in range(rng.choice((1, 2, 17, 63, 64, 65, 130)))]
        request = Asked(prompt, rng.randint(2, most_tokens), rng.choice((0, 0, 0, 1, 4)))
        request.aborted = rng.randint(1, 6) if index % 11 == 7 else None
        request.ignore_eos = rng.random() < 0.5
        asked.append(request)
    return asked


def waves(asked: list[Asked]) -> Iterator[range]:
    """Places of the requests of each wave."""
    start = number = 0
    while start < len(asked):
        yield range(start, min(start + WAVES[number % len(WAVES)], len(asked)))
        start, number = start + WAVES[number % len(WAVES)], number + 1


def play(core: EngineCore, asked: list[Asked]) -> list[list[int]]:
    """A wave's tokens as they are streamed; of an aborted request those that came before."""
    tokens: list[list[int]] = [[] for _ in asked]
    step = 0
    while core.has_unfinished() or step <= max(request.arrives for request in asked):
        for index, request in enumerate(asked):
            if step == request.arrives:
                params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
                core.add_request(str(index), request.prompt, params)
            elif request.aborted is not None and step == request.arrives + request.aborted:
                core.abort_request(str(index))
        for delta in core.step():
            tokens[int(delta.request_id)] += delta.token_ids
        step += 1
    return tokens


def answers(core: EngineCore, asked: list[Asked], before_wave: Callable[[range], None]) -> list[list[int]]:
    found = []
    for places in waves(asked):
        before_wave(places)
        found += play(core, [asked[place] for place in places])
    return found


def plain_answers(core: EngineCore, asked: list[Asked]) -> list[list[int]]:
    """In the same waves, nothing aborted."""
    return answers(core, [replace(a, aborted=None) for a in asked], lambda places: None)


def differences(expected: list[list[int]], found: list[list[int]], asked: list[Asked]) -> list[Difference]:
    """An aborted answer may be shorter."""
    different = []
    for index, (one, other, request) in enumerate(zip(expected, found, asked, strict=True)):
        one = one[: len(other)] if request.aborted is not None else one
        if one != other:
            place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            place = min(len(one), len(other)) if place is None else place
            different.append(Difference(index, place, *((*t, None)[0] for t in (one[place:][:1], other[place:][:1]))))
    return different


def score(core: EngineCore, difference: Difference, expected: list[list[int]], asked: list[Asked]) -> Difference:
    """With the gap of both tokens' logprobs behind the text before them; infinite for one that is far from likely."""
    if difference.plain is None or difference.found is None:
        return replace(difference, gap=float("inf"))
    prompt = asked[difference.index].prompt + expected[difference.index][: difference.place]
    core.add_request("score", prompt, SamplingParams(temperature=0.0, max_tokens=1, logprobs=_SCORED, ignore_eos=True))
    (delta,) = [d for _ in iter(core.has_unfinished, False) for d in core.step()]
    row = {token: value.logprob for token, value in delta.logprobs[0].items()}
    some, other = row.get(difference.plain), row.get(difference.found)
    gap = float("inf") if some is None or other is None else abs(some - other)
    return replace(difference, gap=gap)


class Engines:
    """Starts them on one model and device. drafts: where the trained one lies, and that of random weights."""

    def __init__(self, model: str, device: str, drafts: dict[str, str], kv_cache_dtype: str = "auto"):
        self.model, self.drafts = model, drafts
        self._place = {"device": device, "dtype": "bfloat16"} if device == "cuda" else {}
        self._settings = {"max_num_seqs": 64, "kv_cache_memory_gb": _CACHE_GB, "expert_load": False}
        self._settings["kv_cache_dtype"] = kv_cache_dtype

    def start(self, setting: Setting | None, budget: int = 2048) -> tuple[EngineCore, Callable[[], None]]:
        """None: a plain one whose steps have so many tokens at most. And what ends it."""
        settings = self._settings | self._place
        settings |= {"max_num_batched_tokens": budget if setting is None else setting.budget}
        if setting is not None and setting.draft in SCRIPTS:  # a script reads on the host, which no graph does
            core = build(self.model, setting.num_guesses, **settings, enforce_eager=True)
            return core, core.shutdown
        if setting is not None:
            settings |= {"draft": self.drafts[setting.draft], "tp": setting.world, "ep": setting.world}
            settings |= {"num_draft_tokens": setting.num_guesses, "adaptive_draft_tokens": setting.adaptive}
        core, ranks = start_engine(EngineConfig(self.model, **{"device": "cpu", "num_threads": 1, **settings}))
        return core, ranks.close


def compare(
    engines: Engines, setting: Setting, asked: list[Asked], expected: list[list[int]]
) -> tuple[dict[str, Any], list[Difference]]:
    core, close = engines.start(setting)
    begin = time.perf_counter()

    def teach(places: range) -> None:
        if setting.draft in SCRIPTS:
            core.drafter.script = SCRIPTS[setting.draft]
            core.drafter.texts = [[*asked[i].prompt, *expected[i]] for i in places]

    try:
        found = answers(core, asked, teach)
        counts = core.stats().speculation
    finally:
        close()
    different = differences(expected, found, asked)
    row = asdict(setting) | {
        "answers": len(found),
        "tokens": sum(map(len, found)),
        "aborted": sum(
            a.aborted is not None and len(f) < len(e) for a, f, e in zip(asked, found, expected, strict=True)
        ),
        "guesses": counts.num_draft_tokens,
        "accepted": counts.num_accepted_tokens,
        "different": len(different),
        "seconds": time.perf_counter() - begin,
    }
    return row, different


def shares(settings: list[Setting], asked: list[Asked]) -> Iterator[tuple[Setting, list[int]]]:
    """Settings of one draft and world take the requests in turn, so that each draft sees every one."""
    groups: dict[tuple[str, int], list[Setting]] = {}
    for setting in settings:
        groups.setdefault((setting.draft, setting.world), []).append(setting)
    for group in groups.values():
        for number, setting in enumerate(group):
            yield setting, list(range(number, len(asked), len(group)))


def _say(line: str) -> None:
    print(line, flush=True)


def measure(
    engines: Engines, settings: list[Setting], asked: list[Asked], ranked: int, say: Callable[[str], None] = _say
) -> tuple[list[dict[str, Any]], list[Difference]]:
    """A row for each setting, against plain steps cut alike, and all differences, scored. `ranked`: requests for worlds
    of several ranks."""
    plain, close = engines.start(None)
    try:
        begin = time.perf_counter()
        texts = {2048: plain_answers(plain, asked)}
        for budget in {setting.budget for setting in settings} - texts.keys():
            other, close_other = engines.start(None, budget)
            texts[budget] = plain_answers(other, asked)
            close_other()
            count = sum(a != b for a, b in zip(texts[2048], texts[budget], strict=True))
            say(f"plain with {budget} tokens a step: {count} of {len(asked)} differ from plain with 2048")
        num_tokens = sum(map(len, texts[2048]))
        say(f"plain: {len(asked)} answers, {num_tokens} tokens, {time.perf_counter() - begin:.0f} s")
        rows, scored = [], []
        for setting, indices in shares(settings, asked):
            indices = indices[: ranked if setting.world > 1 else None]
            some, right_ones = [asked[i] for i in indices], [texts[setting.budget][i] for i in indices]
            row, different = compare(engines, setting, some, right_ones)
            different = [score(plain, d, right_ones, some) for d in different]
            rows.append(row | {"largest gap": max((d.gap for d in different), default=None)})
            scored += different
            say(f"{setting}: {row['different']} of {row['answers']} differ, {row['seconds']:.0f} s")
    finally:
        close()
    return rows, scored


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=24, help="of an answer, at most (default 24)")
    parser.add_argument("--drafts", default="trained,random,wrong,right")
    parser.add_argument("--worlds", default="1,2,4", help="ranks; those above 1 over gloo, on the CPU alone")
    parser.add_argument("--ranked", type=int, default=12, help="requests for each world above 1 (default 12)")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="of all engines alike")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    torch.set_num_threads(1)
    drafts = args.drafts.split(",")
    worlds = [int(world) for world in args.worlds.split(",") if args.device == "cpu" or world == "1"]
    settings = [s for s in SETTINGS if s.draft in drafts]
    settings += [Setting(d, world=w) for w in worlds if w > 1 for d in drafts if d not in SCRIPTS]
    model = str(TINY_CHECKPOINT)
    vocabulary = ModelFiles.read(EngineConfig(model)).model_config.vocab_size
    asked = requests(args.prompts, args.tokens, vocabulary)
    with tempfile.TemporaryDirectory() as name:
        directories = {"trained": "auto", "random": str(write_draft(name))}
        engines = Engines(model, args.device, directories, args.kv_cache_dtype)
        rows, scored = measure(engines, settings, asked, args.ranked)
    limit = GAP if args.device == "cuda" else 0.0
    fails = [d for d in scored if not d.gap < limit]
    print(f"\n{format_table(rows)}\n{len(scored)} answers differ, {len(fails)} of them by more than a near-tie.")
    if args.json:
        facts = environment(["python", "benchmarks/equality.py", *sys.argv[1:]])
        told = {"limit": limit, "rows": rows, "differences": [asdict(d) for d in scored], "failed": len(fails)}
        Path(args.json).write_text(json.dumps(facts | told, indent=2) + "\n")
    return 1 if fails else 0


if __name__ == "__main__":
    sys.exit(main())
