import pytest
import torch

from engine.comm.parallel_state import ParallelState
from engine.layers.parameter import empty
from engine.loading import host_memory


@pytest.mark.parametrize("size", [0, 1, 4097, 5 * 2**20 + 3])
def test_zeros_that_can_be_written_and_lie_at_a_page(size):
    memory = host_memory.zeros(size)
    assert memory.shape == (size,) and memory.dtype == torch.uint8 and not memory.any()
    assert size == 0 or memory.data_ptr() % 4096 == 0
    other = host_memory.zeros(size)
    memory.fill_(7)
    assert bool((memory == 7).all()) and not other.any()


@pytest.mark.parametrize("shape", [(7,), (3, 5), (1024, 700)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_a_parameter_is_zeros_of_its_shape_large_or_not(shape, dtype):
    parameter = empty(*shape, dtype=dtype, device=ParallelState().device)
    assert parameter.shape == shape and parameter.dtype == dtype and not parameter.any()
    assert parameter.is_contiguous() and not parameter.requires_grad
