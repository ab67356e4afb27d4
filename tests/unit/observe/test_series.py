"""Counting between scrapes."""

from quire.observe.metrics import FAMILIES
from quire.observe.series import Histogram, Tally, one_two_five


def test_a_value_counts_under_the_bound_it_equals() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 9.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("5.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 17.0


def test_one_observation_can_count_for_many() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.25, 8)
    assert histogram.buckets()[-1][1] == 8.0 and histogram.total == 2.0


def test_bounds_of_lengths_end_at_the_context() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(4096)[-3:] == (500, 1000, 2000)


def test_bounds_rise_and_finer_ones_keep_the_peers() -> None:
    bounds = {f.name: [*map(float, f.bounds.split())] for f in FAMILIES if f.bounds not in ("", "lengths")}
    assert len(bounds) > 10 and all(some == sorted(set(some)) for some in bounds.values())
    peers = {0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
    assert peers < set(bounds["e2e_request_latency_seconds"])


def test_a_tally_begins_at_zero_and_stays_bounded() -> None:
    tally = Tally(("stop",), limit=3)
    assert tally.counts == {("stop",): 0.0}
    for number in range(10):
        tally.add(f"from-a-user-{number}")
    tally.add("stop")
    assert tally.counts == {("stop",): 1.0, ("from-a-user-0",): 1.0, ("from-a-user-1",): 1.0, ("other",): 8.0}
