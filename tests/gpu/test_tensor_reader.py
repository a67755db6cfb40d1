"""Weights on their way to a GPU: the same parts as on the host, from a pinned ring that is used many times over."""

import pytest
import torch
from safetensors.torch import save_file

from engine.loading import tensor_reader
from engine.loading.checkpoint_headers import CheckpointError, read_header
from engine.loading.tensor_reader import Wish
from engine.loading.weights import FiniteChecks

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """300 MB: several rings, tensors longer than a span, small ones and columns."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(1024, 4096, generator=generator).bfloat16() for i in range(20)}
    tensors |= {f"p{i}": torch.randint(0, 2**31 - 1, (2048, 512), generator=generator).int() for i in range(8)}
    tensors |= {"long": torch.randn(8192, 4096, generator=generator).bfloat16(), "shape": torch.tensor([2048, 4096])}
    path = tmp_path_factory.mktemp("reader") / "model.safetensors"
    save_file(tensors, path)
    return path, tensors


def test_every_part_is_on_the_device(file):
    path, tensors = file
    wishes = []
    for i, (name, header) in enumerate(read_header(path).items()):
        part = tuple(
            slice(size // 4, size) if i % 3 == place else slice(None) for place, size in enumerate(header.shape)
        )
        wishes.append(Wish(name, header, part, on_host=name == "shape"))
    kept = {wish.name: (wish, value.clone()) for wish, value in tensor_reader.read(wishes, GPU)}
    assert kept.keys() == tensors.keys()
    for name, (wish, value) in kept.items():
        assert value.is_cuda == (name != "shape")
        assert torch.equal(value.cpu(), tensors[name][wish.part])


def test_what_is_not_finite_is_named_at_the_end(file, tmp_path):
    save_file({"good": torch.ones(2048), "bad": torch.full((2048,), float("nan"))}, tmp_path / "model.safetensors")
    headers = read_header(tmp_path / "model.safetensors")
    checks = FiniteChecks()
    wishes = [Wish(name, header, (slice(None),)) for name, header in headers.items()]
    for wish, value in tensor_reader.read(wishes, GPU):
        checks.add(wish, value)
    with pytest.raises(CheckpointError, match="bad holds a value that is not a number"):
        checks.finish()
