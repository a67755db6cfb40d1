"""`python -m engine.bench spec`: speculation, on texts with a trained draft, or on a rank's share at forced lengths."""

from __future__ import annotations

import argparse

from engine.bench import share, spec_share
from engine.bench.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    share.add_arguments(parser)
    parser.add_argument("--ep-share", type=int, default=1, metavar="M", help="expert groups of the world (default 1)")
    parser.add_argument("--layers", type=int, help="number of layers (default: all)")
    parser.add_argument("--draft", default="auto", help="draft directory, whose weights are made up (default: K2.5's)")
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--points", default="1@4096,16@4096,64@2048", help="batch@context of decode steps")
    parser.add_argument("--accept-lengths", default="2.0,2.5,3.0,1.0", help="of as many guesses as --num-draft-tokens")
    parser.add_argument("--tokens", type=int, default=512, help="that each request decodes (default 512)")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill step (default 8192)")


def run(args: argparse.Namespace) -> Report:
    return spec_share.run(args)
