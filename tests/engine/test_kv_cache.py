from __future__ import annotations

import pytest

from engine.kv_cache import BlockPool, KVCacheManager
from tests.scheduler_model import make_request


def test_block_0_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.num_usable == pool.num_free == 4
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    with pytest.raises(IndexError):
        pool.take(1)


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks):
    with pytest.raises(ValueError, match="2"):
        BlockPool(num_blocks)


def test_grow_takes_whole_blocks_or_nothing():
    manager = KVCacheManager(num_blocks=5, block_size=4)
    one, two = make_request("one", 9, 1), make_request("two", 9, 1)
    assert manager.max_tokens == 16
    assert manager.grow(one, 8) and len(one.block_ids) == 2
    assert manager.grow(one, 9) and len(one.block_ids) == 3
    assert manager.grow(one, 5) and len(one.block_ids) == 3, "growing to less takes nothing and gives nothing"
    assert not manager.grow(two, 5) and two.block_ids == [] and manager.pool.num_free == 1
    assert manager.usage == 0.75
    manager.free(one)
    manager.free(one)
    assert one.block_ids == [] and manager.usage == 0.0 and manager.pool.num_free == 4
