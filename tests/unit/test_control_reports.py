"""What ranks report of an iteration: small, read back as it was, and telling a busy link from a late one."""

from __future__ import annotations

import json
import random

import pytest

from penstock.control import Cause, ControlError, OpTimes, Transfers
from penstock.control.events import Row, busy_times, event_from_json, event_to_json, held_share, rounded
from penstock.control.watches import cause_of, estimate
from tiers import others_nightly

pytestmark = pytest.mark.unit
MB = 2.0**20


def passed(began: list[float], latency: float, busy: float, noise: float = 0.0, seed: int = 0) -> list[Row]:
    """Messages over a link that is busy so long with each, and late: by hand, not by the simulator."""
    rng, free, last, rows = random.Random(seed), 0.0, 0.0, []
    for begin in began:
        free = max(free, begin) + busy * rng.gauss(1, noise)
        last = max(last, free + latency * rng.gauss(1, noise))
        rows.append((MB, begin, last))
    return rows


BURSTS = [10.0 * k + 200.0 * (k // 8) for k in range(32)]
"""Eight messages 10 ms apart, then a pause, four times."""


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(("latency", "busy"), [(0.0, 25.0), (5.0, 30.0), (30.0, 15.0), (60.0, 40.0)])
def test_a_busy_link_is_told_from_a_late_one(latency: float, busy: float, noise: float, seed: int) -> None:
    rows = passed(BURSTS, latency, busy, noise, seed)
    found = Transfers.of((0, 1), rows)
    assert found.busy == pytest.approx(busy, rel=0.02 if not noise else 0.15)
    # What is left is what each takes by itself.
    assert sum(found.ms) / 32 == pytest.approx(latency + busy, rel=0.01 if not noise else 0.1)


@pytest.mark.parametrize("seed", others_nightly(range(10), range(3)))
@pytest.mark.parametrize("noise", [0.0, 0.03, 0.2])
@pytest.mark.parametrize("latency", [15.0, 30.0, 60.0])
def test_a_late_link_is_not_taken_for_a_busy_one(latency: float, noise: float, seed: int) -> None:
    rows = passed(BURSTS, latency, 0.0, noise, seed)
    found = Transfers.of((0, 1), rows)
    assert found.busy == 0.0
    assert found.ms == tuple(rounded(ended - began) for _, began, ended in rows)


def test_messages_that_never_meet_do_not_tell() -> None:
    rows = passed([100.0 * k for k in range(12)], 20.0, 10.0)
    assert busy_times(rows) is None
    assert Transfers.of((0, 1), rows).busy is None
    # Nor do those that begin just as the one before ends.
    assert busy_times(passed([30.0 * k for k in range(12)], 20.0, 10.0)) is None


def test_bandwidth_is_told_by_sizes() -> None:
    free, rows = 0.0, []
    for number, began in enumerate(BURSTS):
        size = (1 + 3 * (number % 2)) * MB
        free = max(free, began) + 10.0 * size / MB
        rows.append((size, began, free + 5.0))
    assert busy_times(rows) == pytest.approx([10.0, 40.0] * 16)
    times = Transfers.of((0, 1), rows)
    assert set(times.ms) == {15.0, 45.0}


def test_what_waits_for_a_lost_packet_arrives_with_it() -> None:
    rows = [(MB, began, began + 5.0) for began in BURSTS]
    for lost in (3, 12, 25):
        rows[lost] = (MB, rows[lost][1], rows[lost][1] + 45.0)
        for behind in range(lost + 1, 32):
            rows[behind] = (MB, rows[behind][1], max(rows[behind][2], rows[lost][2]))
    found = Transfers.of((0, 1), rows)
    assert held_share(rows) == 11 / 32
    assert found.held == 0.34
    calm = estimate([Transfers((0, 1), (MB,), (5.0,) * 32)])
    assert cause_of(calm, estimate([found])) is Cause.LOSS


def test_the_cause_follows_from_what_is_reported() -> None:
    calm = estimate([Transfers((0, 1), (MB,), (1.0,) * 32)])
    for latency, busy, cause in ((40.0, 0.0, Cause.LATENCY), (0.0, 40.0, Cause.OCCUPANCY)):
        found = Transfers.of((0, 1), passed(BURSTS, latency, busy))
        assert cause_of(calm, estimate([found])) is cause
    assert cause_of(calm, estimate([Transfers((0, 1), (MB,), (40.0,) * 32)])) is Cause.DELAY


@pytest.mark.parametrize(
    "value", [0.0, 1e-5, 1e-4, 9.996e-4, 0.123456, 9.994, 9.996, 30.0, 60.0, 99.96, 412.3, 99_900.0, 3.6e6]
)
def test_times_have_three_digits_in_the_log_and_outside(value: float) -> None:
    event = Transfers((0, 1), (MB,), (value,))
    assert event.ms == (rounded(value),) == (rounded(rounded(value)),)
    assert event.ms[0] == pytest.approx(value, rel=0.005)
    text = json.dumps(event_to_json(event))
    assert len(text) < 110
    assert event_from_json(json.loads(text)) == event


def test_reports_come_back_from_json() -> None:
    sizes = [MB, 4 * MB] * 16
    rows = [(size, began, began + 3.3) for size, began in zip(sizes, BURSTS, strict=True)]
    same = [(MB, began, began + 3.3) for began in BURSTS]
    events = [
        Transfers.of((3, 2), rows),
        Transfers.of((3, 2), same),
        Transfers((0, 1), (0.0,), (5.0,)),
        OpTimes.of(1, 2, [("F", 10.04), ("F", 10.0), ("F", 11.0), ("B", 20.0)]),
    ]
    for event in events:
        assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event
    assert len(json.dumps(event_to_json(events[1]), separators=(",", ":"))) < 220
    assert events[3].ms == (("B", (20.0, 20.0)), ("F", (10.0, 11.0)))


@pytest.mark.parametrize(
    "value",
    [
        {"transfers": {}},
        {"transfers": {"link": [0, 1], "num_bytes": [1.0], "ms": []}},
        {"transfers": {"link": [0, 1], "num_bytes": [1.0, 2.0], "ms": [30.0]}},
        {"transfers": {"link": [0, 1], "num_bytes": [1.0], "ms": [30.0, 30.2], "busy": -1.0}},
        {"transfers": {"link": [0, 1], "num_bytes": [1.0], "ms": [30.0, 30.2], "held": 2.0}},
        {"transfers": {"link": [1, 1], "num_bytes": [1.0], "ms": [30.0]}},
        {"transfers": {"link": "0:1", "num_bytes": [1.0], "ms": [30.0]}},
        {"transfers": {"link": [0, 1], "num_bytes": [1.0], "ms": "30.0"}},
        {"transfers": {"link": [0, 1], "num_bytes": [1.0], "ms": [30.0, -1.0]}},
        {"transfers": {"link": [0, 1], "num_bytes": [1.0], "ms": [30.0, "30.0"]}},
        {"ops": {"rank": 0, "stage": 0, "ms": [["F", [30.0]]]}},
        {"ops": {"rank": 0, "stage": 0, "ms": "~U"}},
        {"ops": {"rank": 0, "ms": [["F", [30.0, 30.0]]]}},
        {"ops": {"rank": 0, "stage": -1, "ms": [["F", [30.0, 30.0]]]}},
        {"offered": {}},
    ],
)
def test_reports_that_make_no_sense_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(ControlError):
        event_from_json(value)
