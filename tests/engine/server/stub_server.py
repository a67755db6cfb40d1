"""The real server over a core without a model, on a port of its own; each request says what its answer will be.

    python -m tests.engine.server.stub_server --port 8001 --tokens-per-step 1,4,2

The last `EMIT:` in the prompt is followed by the answer in base64, control tokens spelled out; a prompt without one is
answered "thoughts</think>answer". For clients that want an answer of a certain form.
"""

from __future__ import annotations

import argparse
import base64
import re
import sys

import uvicorn

from engine.sampling_params import SamplingParams
from engine.server.app import create_app
from engine.server.client import EngineClient
from tests.engine.server.fake_core import FakeCore
from tests.engine.server.harness import emit, make_core, tokenizer

WISH = re.compile(r"EMIT:([A-Za-z0-9+/]+=*)")


def wish(answer: str) -> str:
    """What a message must hold so that the stub answers so."""
    return f"EMIT:{base64.b64encode(answer.encode()).decode()}"


class StubCore(FakeCore):
    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        wishes = WISH.findall(tokenizer().decode(prompt_token_ids, skip_special_tokens=False))
        if wishes:
            self.scripts.extend([emit(base64.b64decode(wishes[-1]).decode())] * params.n)
        super().add_request(request_id, prompt_token_ids, params)


def make_stub(tokens_per_step: int | list[int] = 1) -> StubCore:
    core = make_core()
    options = {"max_model_len": 1_000_000, "tokens_per_step": tokens_per_step, "default_script": core.default_script}
    return StubCore(core.tokenizer, core.chat_template, **options)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--tokens-per-step", default="1", metavar="N,M", help="tokens of a choice's steps, in turn")
    args = parser.parse_args(argv)
    client = EngineClient(make_stub([int(size) for size in args.tokens_per_step.split(",")]))
    app = create_app(client, served_model_names=["stub"])
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
