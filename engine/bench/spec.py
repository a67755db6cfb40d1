"""`python -m engine.bench spec`: speculation on a rank's share at forced accept lengths; with `--texts` on texts, with
a real target and its draft."""

from __future__ import annotations

import argparse

from engine.bench import share, spec_share, spec_text
from engine.bench.report import Report
from engine.config import FULL_CONFIG


def add_arguments(parser: argparse.ArgumentParser) -> None:
    share.add_arguments(parser)
    parser.add_argument("--draft", default="auto", help="draft directory (default: the bundled one of the model)")
    parser.add_argument("--num-draft-tokens", type=int, default=3, help="most guesses a step (default 3)")
    parser.add_argument("--tokens", type=int, help="that each request decodes (default 512; with --texts at most 64)")
    _add_share_arguments(parser.add_argument_group("a rank's share, with made-up weights"))
    _add_text_arguments(parser.add_argument_group("texts, with real weights (default model: the bundled tiny one)"))
    parser.set_defaults(model=None)


def _add_share_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ep-share", type=int, default=1, metavar="M", help="expert groups of the world (default 1)")
    group.add_argument("--layers", type=int, help="number of layers (default: all)")
    group.add_argument("--points", default="1@4096,16@4096,64@2048", help="batch@context of decode steps")
    group.add_argument("--accept-lengths", default="2.0,2.5,3.0,1.0", help="of as many guesses as --num-draft-tokens")
    group.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill step (default 8192)")


def _add_text_arguments(group: argparse._ArgumentGroup) -> None:
    prompts = str(spec_text.PROMPTS)
    group.add_argument("--texts", nargs="?", const=prompts, metavar="FILE", help="prompts by source (default: bundled)")
    group.add_argument("--batches", default="1", help="requests at once (default 1)")
    group.add_argument("--prompts", type=int, default=16, help="of each source, at most (default 16)")
    group.add_argument("--rounds", type=int, default=3, help="measured runs of each arm (default 3)")
    group.add_argument("--most-guesses", type=int, default=spec_text.MOST_GUESSES, help="of the accept lengths")
    group.add_argument("--num-threads", type=int, help="of the CPU")


def run(args: argparse.Namespace) -> Report:
    if args.texts:
        spec_text.set_defaults(args)
        return spec_text.run(args)
    args.model, args.tokens = args.model or str(FULL_CONFIG), args.tokens or 512
    return spec_share.run(args)
