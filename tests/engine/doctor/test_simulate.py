"""The slow link's own arithmetic, and that it reaches every verb of a dispatcher."""

import pytest
import torch

from engine.comm.meter import ATTENTION_REDUCE, MOE_COMBINE
from engine.comm.parallel_state import ParallelState
from engine.doctor.simulate import ObservedDispatcher, SlowLink, parse_link


def test_a_call_takes_hops_bytes_and_the_factor_past_the_cliff():
    link = SlowLink(100, 2.0, 1000, 8)
    assert link.seconds(2, 4000, 999) == pytest.approx(200e-6 + 2e-6)
    assert link.seconds(2, 4000, 1000) == pytest.approx(8 * (200e-6 + 2e-6))


def test_parsing():
    assert parse_link("250,20") == SlowLink(250, 20)
    assert parse_link("250,20,32768,8") == SlowLink(250, 20, 32768, 8)


@pytest.mark.parametrize("text", ["", "1", "1,2,3", "a,b", "0,1", "-1,1", "1,nan", "1,inf", "1,2,3,4,5"])
def test_nonsense_is_refused_in_a_sentence(text):
    with pytest.raises(ValueError, match=r"give latency_us,GB/s"):
        parse_link(text)


class Sending:
    """A dispatcher of two hops that sends three bytes in a reduce and five in a combine."""

    name = "allreduce"

    def __init__(self, parallel):
        self.parallel = parallel

    def reduce(self, x):
        self.parallel.meter.count(ATTENTION_REDUCE, 3)
        return x

    def dispatch(self, x):
        return x

    def combine(self, x):
        self.parallel.meter.count(MOE_COMBINE, 5)
        return x


def test_each_verb_that_sends_is_delayed_and_noted():
    parallel, waited = ParallelState(), []
    observed = ObservedDispatcher(Sending(parallel), parallel, 64, SlowLink(10, 1.0), waited.append)
    x = torch.ones(1)
    assert observed.reduce(x) is x and observed.dispatch(x) is x and observed.combine(x) is x
    assert observed.sent == {"reduce": 3, "dispatch": 0, "combine": 5}
    assert waited == [pytest.approx(20e-6 + 3e-9), pytest.approx(20e-6 + 5e-9)]
