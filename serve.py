"""`torchrun serve.py --tp 8 --ep 8`, or plain `python serve.py`: the OpenAI-style server.

Turns arguments into a configuration, starts or joins the ranks, then is the server (rank 0) or a worker (the others).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from dataclasses import fields
from typing import Any

from engine import log
from engine.collector import spare_the_engine
from engine.config import DEVICES, DTYPES, KV_CACHE_DTYPES, LOAD_FORMATS, ConfigError, EngineConfig
from engine.errors import EngineDeadError
from engine.json_files import parse_json
from engine.loading.weights import CheckpointError
from engine.signals import Signals

DRAIN_SECONDS = 25.0  # torchrun kills a rank 30 s after SIGTERM
MOST_SECONDS = 24 * 3600
MOST_BODY_MB = 1024
LOG_LEVELS = ("debug", "info", "warning", "error")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="serve.py", description=__doc__.splitlines()[0])
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", help="checkpoint directory (default: the bundled tiny one)")
    engine.add_argument("--tp", type=int, default=1, help="ranks; attention is split over all of them")
    engine.add_argument("--ep", type=int, default=1, help="expert groups; divides --tp (default 1: experts sliced)")
    engine.add_argument(
        "--tp-share", type=int, metavar="N", help="hold one rank's share of N ranks, no sums over ranks"
    )
    engine.add_argument("--ep-share", type=int, metavar="M", help="expert groups of the N ranks (default 1)")
    engine.add_argument("--draft", type=_draft, help="EAGLE-3 draft directory, auto, or none (default)")
    engine.add_argument("--num-draft-tokens", type=int, default=3, help="most guesses a step verifies of a request")
    engine.add_argument(
        "--adaptive-draft-tokens",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify as many guesses as pay by measurement, none where they do not",
    )
    engine.add_argument("--device", choices=DEVICES, default="auto")
    engine.add_argument("--dtype", choices=DTYPES, default="auto")
    engine.add_argument("--max-model-len", type=int, help="longest prompt and answer together, in tokens")
    engine.add_argument("--max-num-seqs", type=int, default=64, help="requests in one step")
    engine.add_argument("--max-num-batched-tokens", type=int, default=2048, help="tokens in one step")
    engine.add_argument("--kv-cache-memory-gb", type=float, help="memory for the KV cache, in GiB a rank")
    engine.add_argument("--graph-memory-gb", type=float, default=1.0, help="most memory for CUDA graphs, in GiB a rank")
    engine.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="requests share the KV blocks of equal prompt beginnings",
    )
    engine.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="fp8: 1.75 times the tokens")
    engine.add_argument("--kv-offload-gb", type=float, default=0.0, help="host memory for cold blocks, in GiB a rank")
    engine.add_argument("--max-step-ms", type=float, help="longest step with prefill in it (default: 50 on a GPU)")
    engine.add_argument("--max-queued-requests", type=int, default=1024, help="answers that may wait; more get 429")
    engine.add_argument("--queue-timeout", type=float, help="seconds a request may wait for its first step")
    engine.add_argument("--request-timeout", type=float, help="seconds a request may take")
    engine.add_argument("--moe-comm", default="auto", help="how ranks exchange rows: auto, or README's table")
    engine.add_argument("--comm-cache", metavar="DIR|off", help="keeps what was measured (default: the user's cache)")
    engine.add_argument("--attention-backend", default="auto")
    engine.add_argument("--enforce-eager", action="store_true", help="run without CUDA graphs")
    engine.add_argument("--load-format", choices=LOAD_FORMATS, default="auto", help="dummy makes weights up")
    engine.add_argument("--verify-checksums", action="store_true", help="compare weight files with SHA256SUMS at start")
    engine.add_argument(
        "--prepared-weights", metavar="DIR", help="local disk: keeps each rank's weights as loaded, for the next start"
    )
    engine.add_argument(
        "--self-test",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="try one INT4 expert against its plain matrices after loading",
    )
    engine.add_argument("--seed", type=int, default=0)
    engine.add_argument("--num-threads", type=int, help="CPU threads a rank")
    engine.add_argument(
        "--expert-load",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count on the device which experts tokens are routed to, for GET /expert_load",
    )
    engine.add_argument("--expert-map", metavar="FILE", help="JSON: which physical slot holds which expert")
    engine.add_argument("--step-timeout", type=float, default=20.0, help="seconds without progress that are a hang")
    engine.add_argument("--comm-timeout", type=float, default=600.0, help="seconds ranks wait for each other at start")
    engine.add_argument("--hf-overrides", type=_json_object, default={}, metavar="JSON", help="config.json keys")
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=8000)
    server.add_argument("--api-key", action="append", default=[], help="may be repeated; other users' ps shows it")
    server.add_argument("--api-key-file", metavar="FILE", help="one key a line; see that no other user can read it")
    server.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages from there may call the server (CORS), * for any; may be repeated (default: none)",
    )
    server.add_argument("--ssl-certfile", metavar="FILE", help="PEM certificate (chain): serve https")
    server.add_argument("--ssl-keyfile", metavar="FILE", help="its key, if not in the same file")
    server.add_argument("--max-body-mb", type=_megabytes, default=8, help="largest request body in MiB; more gets 413")
    server.add_argument(
        "--sse-keep-alive",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="a stream with nothing to send sends a comment so often (default 10, 0: never)",
    )
    server.add_argument("--served-model-name", nargs="+", help="names that requests may use, the first is shown")
    server.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=DRAIN_SECONDS,
        metavar="SECONDS",
        help="how long SIGTERM or Ctrl-C lets accepted requests finish (default 25; torchrun kills after 30)",
    )
    server.add_argument("--log-level", choices=LOG_LEVELS, default="info")
    return parser.parse_args(argv)


def _draft(text: str) -> str | None:
    return None if text == "none" else text


def _megabytes(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text[:9]) <= MOST_BODY_MB):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number of MiB from 1 to {MOST_BODY_MB}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a number of seconds from 0 to {MOST_SECONDS}")
    return seconds


def _json_object(text: str) -> dict:
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a JSON object")
    return value


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    rank = int(os.environ.get("RANK", "0"))
    log.setup(arguments.log_level, rank)
    try:
        names = {field.name for field in fields(EngineConfig)}
        config = EngineConfig(**{k: v for k, v in vars(arguments).items() if k in names})
        if rank == 0:
            return _serve(config, arguments)
        return _work(config)
    except (ConfigError, CheckpointError) as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    except EngineDeadError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 1


def _serve(config: EngineConfig, arguments: argparse.Namespace) -> int:
    _die_at_once_on_signals()
    listener = _bind(arguments.host, arguments.port)
    options = _server_options(arguments)
    from engine.launch import start_engine
    from engine.loading.progress import READY, LoadProgress
    from engine.server.app import create_app
    from engine.server.client import EngineClient
    from engine.server.http_thread import Server
    from engine.server.loading import Gate

    progress = LoadProgress()
    scheme = "https" if arguments.ssl_certfile else "http"
    place = f"{scheme}://{arguments.host}:{listener.getsockname()[1]}"
    gate = Gate(progress.snapshot, options["api_keys"], options["allow_origins"])
    shared = {name: getattr(arguments, name) for name in ("drain_timeout", "log_level", "ssl_certfile", "ssl_keyfile")}
    with Server(gate, listener, **shared) as server:
        log.logger.info("loading; %s/health says how far it is", place)
        core, ranks = start_engine(config, True, progress, sys.stderr if _shows_bar() else None)
        client = EngineClient(core, server.stop_after_failure, config.max_queued_requests)
        names = arguments.served_model_name or [core.model_name]
        app = create_app(client, served_model_names=names, **options)
        spare_the_engine()
        progress.enter(READY)
        server.open(app, ranks.kill)
        log.logger.info("serving %s on %s", names[0], place)
        server.wait()
        client.close()
    return 1 if client.error else 0


def _shows_bar() -> bool:
    return sys.stderr.isatty() and log.logger.isEnabledFor(logging.INFO)


def _work(config: EngineConfig) -> int:
    """A rank that torchrun started: a first signal leaves the end to rank 0, a second ends it at once."""
    from engine.launch import start_engine
    from engine.worker import follow

    _die_at_once_on_signals()
    follower, ranks = start_engine(config)
    signals = Signals()

    def note(number: int, frame: object) -> None:
        if signals.is_second(number):
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return follow(follower, ranks)


def _die_at_once_on_signals() -> None:
    """While the engine starts there is nothing to finish, and started ranks end with this process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _bind(host: str, port: int) -> socket.socket:
    """Takes the address, and listens: of two servers that want one, the later ends before it reads any weight."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # asyncio turns Nagle's algorithm off only for sockets made with an explicit protocol; accepted ones inherit this.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except (OSError, OverflowError, TypeError, ValueError) as error:  # a host name that cannot be encoded
        raise ConfigError(f"cannot listen on {host} port {port} ({error}); choose another with --port.") from None
    return listener


def _server_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `create_app` needs beside the engine. Raises ConfigError."""
    from engine.server.access import check_certificate, check_origins, collect_keys

    if not all(arguments.served_model_name or ["the directory's"]):
        raise ConfigError("--served-model-name is empty; give a name or leave the option out.")
    keys = collect_keys(arguments.api_key, arguments.api_key_file)
    check_certificate(arguments.ssl_certfile, arguments.ssl_keyfile)
    if not keys and arguments.host not in ("127.0.0.1", "::1", "localhost"):
        log.logger.warning(
            "listening on %s without --api-key or --api-key-file: anyone who can reach it can use it", arguments.host
        )
    return {
        "api_keys": keys,
        "allow_origins": check_origins(arguments.allow_origin),
        "max_body_bytes": arguments.max_body_mb * 2**20,
        "sse_keep_alive": arguments.sse_keep_alive,
    }


if __name__ == "__main__":
    sys.exit(main())
