"""Expected experts of the slowest rank, against a published table of the full model."""

import pytest

from engine.doctor.experts import distinct_experts, slowest_group


@pytest.mark.parametrize(("rows", "distinct", "slowest"), [(1, 8.0, 2.56), (4, 31.0, 6.71), (8, 59.5, 11.12)])
def test_eight_groups_of_384_experts(rows, distinct, slowest):
    assert distinct_experts(384, 8, rows) == pytest.approx(distinct, rel=0.003)
    assert slowest_group(384, 8, 8, rows) == pytest.approx(slowest, rel=0.02)


@pytest.mark.parametrize(("groups", "rows", "ratio"), [(2, 1, 1.27), (2, 4, 1.14), (4, 1, 1.75), (8, 64, 1.12)])
def test_hybrids_lie_between(groups, rows, ratio):
    assert slowest_group(384, 8, groups, rows) * groups / distinct_experts(384, 8, rows) == pytest.approx(
        ratio, rel=0.02
    )


def test_one_group_is_exact_and_the_simulation_repeats():
    assert slowest_group(384, 8, 1, 4) == distinct_experts(384, 8, 4)
    first = slowest_group(48, 4, 4, 3)
    slowest_group.cache_clear()
    assert slowest_group(48, 4, 4, 3) == first
