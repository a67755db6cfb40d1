"""kv_cache_dtype="fp8" on the CPU: the engine keeps its promises among runs with such a cache, which holds more."""

from __future__ import annotations

import random

import pytest
import torch

from engine.core import EngineCore
from engine.kernels import kv_layout
from engine.sampling_params import SamplingParams
from tests.answers import ask
from tests.blocks import set_block_size
from tests.checkpoints import SMALL, build_checkpoint
from tests.drafts import DraftShape, write_draft
from tests.scripted_drafts import build, build_real, sometimes, teach

BLOCK = 8
CHUNK = 12
ROW_BYTES = kv_layout.places(SMALL.kv_lora_rank, SMALL.qk_rope_head_dim).end
PLAIN_ROW_BYTES = 4 * (SMALL.kv_lora_rank + SMALL.qk_rope_head_dim)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of 8 tokens, so that short requests cross many."""
    with pytest.MonkeyPatch.context() as patch:
        set_block_size(patch, BLOCK)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("fp8"), SMALL)


def fp8(checkpoint, guesses: int | None = None, replays: bool = False, **settings) -> EngineCore:
    return build(checkpoint, guesses, replays, **{"kv_cache_dtype": "fp8", "max_model_len": 160} | settings)


@pytest.fixture(scope="module")
def roomy(checkpoint) -> EngineCore:
    """Whole prompts in one step, no preemption, no guesses."""
    return fp8(checkpoint)


def requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Some begin alike, over several blocks."""
    rng = random.Random(seed)
    shared = [rng.randrange(300) for _ in range(2 * BLOCK + 3)]
    found = []
    for i in range(count):
        prompt = (shared if i % 3 == 0 else []) + [rng.randrange(300) for _ in range(rng.randint(1, 50))]
        how = {"temperature": 0.0} if i % 2 else {"seed": i}
        found.append((prompt, SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True, **how)))
    return found


def test_an_answer_is_the_same_with_chunks_preemption_and_company(checkpoint, roomy):
    budget = 20.5 * BLOCK * ROW_BYTES * SMALL.num_hidden_layers / 2**30
    shape = {"max_num_seqs": 5, "max_num_batched_tokens": CHUNK, "max_model_len": None}
    tight = fp8(checkpoint, kv_cache_memory_gb=budget, **shape)
    asked = requests(14, 0)
    alone = [ask(roomy, request)[0].token_ids for request in asked]
    assert [answer.token_ids for answer in ask(tight, *asked)] == alone
    assert tight.stats().num_preemptions > 0


def test_prompts_asked_again_get_the_same_answers(roomy):
    asked = requests(6, 1)
    first, second = ([a.token_ids for a in ask(roomy, *asked)] for _ in range(2))
    assert first == second and len({tuple(ids) for ids in first}) == 6


@pytest.mark.parametrize("replays", [False, True], ids=["eager", "ahead"])
def test_guesses_change_no_answer(checkpoint, roomy, replays):
    guessing, asked = fp8(checkpoint, 4, replays, max_num_seqs=5), requests(5, 2)
    expected = ask(roomy, *asked)
    teach(guessing, asked, expected, sometimes)
    found = ask(guessing, *asked)
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]
    assert sum(a.metrics.num_accepted_tokens for a in found) > 10


def test_a_latent_draft_keeps_a_cache_of_its_own_type(checkpoint, roomy, tmp_path):
    shape = DraftShape(hidden_size=SMALL.hidden_size, vocab_size=SMALL.vocab_size)
    draft = write_draft(tmp_path / "draft", shape, layer_ids=(0, 1, 2))
    core = build_real(checkpoint, draft, 2, kv_cache_dtype="fp8", max_model_len=160)
    runner, asked = core.replica.runner, requests(4, 3)
    assert runner.caches.dtype == torch.uint8 and runner.sampled_step.cache.dtype == torch.float32
    assert [a.token_ids for a in ask(core, *asked)] == [a.token_ids for a in ask(roomy, *asked)]


def test_logprobs_are_those_of_rounded_rows(checkpoint, roomy):
    """The bytes are what attention reads: a plain cache of rounded rows gives the same, one of exact rows does not."""
    plain = build(checkpoint, None, max_model_len=160)
    (prompt, _), asks = requests(1, 4)[0], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    def logprobs(core: EngineCore) -> torch.Tensor:
        found = ask(core, (prompt, asks))[0].prompt_logprobs[1:]
        return torch.tensor([row[token].logprob for token, row in zip(prompt[1:], found, strict=True)])

    exact, ours = logprobs(plain), logprobs(roomy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_layout.PlainRows, "pack", rounded)
        expected = logprobs(plain)
    assert torch.allclose(ours, expected, atol=1e-4) and not torch.allclose(ours, exact, atol=1e-2)


def rounded(self, rows_X: torch.Tensor, latent: int) -> torch.Tensor:
    fp8 = kv_layout.FP8
    return fp8.unpack(fp8.pack(rows_X, latent), latent, rows_X.shape[-1] - latent, rows_X.dtype)


def test_the_same_memory_holds_more_tokens(checkpoint):
    """The tiny shape's: the real one's 1152 bytes become 656."""
    memory = {"kv_cache_memory_gb": 40.5 * BLOCK * PLAIN_ROW_BYTES * SMALL.num_hidden_layers / 2**30}
    plain, small = (
        build(checkpoint, None, kv_cache_dtype=dtype, max_num_seqs=64, **memory).replica.runner
        for dtype in ("auto", "fp8")
    )
    assert plain.num_blocks == 40 and small.num_blocks == int(40.5 * PLAIN_ROW_BYTES / ROW_BYTES) > 60
    assert small.caches.shape == (SMALL.num_hidden_layers, small.num_blocks, BLOCK, ROW_BYTES)
