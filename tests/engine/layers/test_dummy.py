"""Made-up weights: the same for the same seed, everything filled, activations of order 1 through many layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.layers.dummy import fill_dummy
from engine.layers.norm import RMSNorm
from engine.model_files import ModelFiles
from engine.model_runner import ModelRunner
from tests.checkpoints import SMALL, TRUE_HEADS
from tests.shares import config_directory


def runner_of(directory, **settings) -> ModelRunner:
    settings = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "kv_cache_memory_gb": 0.02} | settings
    config = EngineConfig(str(directory), **settings)
    return ModelRunner(config, ModelFiles.read(config), ParallelState(**config.placement()))


def weights(runner: ModelRunner) -> dict[str, torch.Tensor]:
    return dict(runner.model.named_parameters())


@pytest.mark.parametrize(("shape", "quant"), [(SMALL, "int4"), (TRUE_HEADS, "bf16")])
def test_the_seed_decides_and_nothing_is_left_out(tmp_path, shape, quant):
    directory = config_directory(tmp_path, shape, quant)
    one, same, other = (weights(runner_of(directory, seed=seed)) for seed in (1, 1, 2))
    for name, value in one.items():
        assert torch.equal(value, same[name]), name
        assert not torch.equal(value, other[name]), name
        assert value.isfinite().all() and value.float().std() > 0, name
        assert value.ne(0).float().mean() > 0.99, name


@torch.inference_mode()
def test_activations_keep_their_size_and_routing_is_diverse(tmp_path):
    from engine.bench import step
    from engine.bench.routing import counted_experts

    directory = config_directory(tmp_path, SMALL)
    runner = runner_of(directory, hf_overrides={"num_hidden_layers": 61, "n_routed_experts": 64})
    output = step.prefill_step(runner, 100)
    with counted_experts(runner.model) as experts:
        hidden_TD = runner.model(runner.input_batch.build(output, runner.dispatchers.for_rows(1)), runner.caches)
    assert hidden_TD.isfinite().all() and 0.5 < hidden_TD.std() < 2
    logits_TV = runner.model.logits(hidden_TD)
    assert logits_TV.isfinite().all() and 0.2 < logits_TV.std() < 5
    assert min(experts.distinct) > 50, "100 tokens with 2 experts each should meet nearly all of 64"


class _Packed(nn.Module):
    """A storage that the filler has never heard of."""

    width, columns = 64, slice(0, 32)

    def __init__(self):
        super().__init__()
        for name, dtype in (("words", torch.int32), ("bytes", torch.uint8), ("shorts", torch.int16)):
            self.register_parameter(name, nn.Parameter(torch.zeros(64, 64, dtype=dtype), requires_grad=False))
        self.scale = nn.Parameter(torch.zeros(64, 2, dtype=torch.bfloat16), requires_grad=False)
        self.down_scale = nn.Parameter(torch.zeros(64, 1, dtype=torch.bfloat16), requires_grad=False)


def test_packed_words_take_all_bits_and_scales_are_small_with_either_sign():
    module = _Packed()
    fill_dummy(module, 7)
    for words in (module.words, module.bytes, module.shorts):
        nibbles = words.data.contiguous().view(torch.uint8).flatten()
        nibbles = torch.cat([nibbles & 15, nibbles >> 4]).float()
        assert abs(nibbles.mean() - 7.5) < 0.2 and nibbles.std() == pytest.approx(4.61, abs=0.1)
    for scale, inputs in ((module.scale, 64), (module.down_scale, 32)):
        unit = 1 / (4.61 * inputs**0.5)
        assert scale.abs().min() > 0.45 * unit and scale.abs().max() < 1.55 * unit
        assert 0.4 < (scale > 0).float().mean() < 0.6


def test_norms_are_near_one_and_the_router_stays_float32(tmp_path):
    runner = runner_of(config_directory(tmp_path, SMALL))
    norms = [m.weight for m in runner.model.modules() if isinstance(m, RMSNorm)]
    assert norms and all((w - 1).abs().max() <= 0.2 for w in norms)
    router = runner.model.layers[1].feed_forward.router
    assert router.bias.dtype == torch.float32 and 0 < router.bias.abs().max() <= 0.01


def test_the_meta_device_is_left_alone():
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    fill_dummy(layer, 0)
    fill_dummy(nn.Identity(), 0)
    assert layer.weight.device.type == "meta"
