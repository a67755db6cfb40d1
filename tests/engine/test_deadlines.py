"""Which answers are past their time, in the order in which they fell due."""

from engine.deadlines import Deadlines


def test_without_limits_nothing_is_ever_due():
    deadlines = Deadlines()
    deadlines.add("a", 0.0)
    deadlines.begin("a")
    assert deadlines.take_due(1e9) == []
    deadlines.end("a")


def test_waiting_and_taking_are_bounded_apart():
    deadlines = Deadlines(queue_timeout=1.0, request_timeout=5.0)
    for sequence_id, arrival in (("a", 0.0), ("b", 0.0), ("c", 0.5)):
        deadlines.add(sequence_id, arrival)
    deadlines.begin("a")
    assert deadlines.take_due(0.9) == []
    assert deadlines.take_due(1.0) == [("b", "queue_timeout")]
    assert deadlines.take_due(2.0) == [("c", "queue_timeout")]
    assert deadlines.take_due(4.9) == []
    assert deadlines.take_due(5.0) == [("a", "request_timeout")], "those timed out before are forgotten"
    assert deadlines.take_due(1e9) == []


def test_what_has_ended_leaves_nothing_behind():
    deadlines = Deadlines(queue_timeout=1.0, request_timeout=5.0)
    for i in range(1000):
        deadlines.add(str(i), float(i))
        deadlines.end(str(i))
    assert deadlines.take_due(1e9) == [] and not any(deadlines._due.values())


def test_a_wait_and_a_whole_that_fall_due_together_count_once():
    deadlines = Deadlines(queue_timeout=5.0, request_timeout=5.0)
    deadlines.add("a", 0.0)
    assert deadlines.take_due(6.0) == [("a", "queue_timeout")]
