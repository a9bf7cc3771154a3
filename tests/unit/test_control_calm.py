"""When the controller asks for full reports of steps, and when how long they took is enough."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.control import Configuration, Controller, IterationEnded, Job, Transfers
from penstock.control.configuration import peaks
from penstock.control.steps import CLOSELY

pytestmark = pytest.mark.unit

COSTS = ps.Costs.uniform(4, f=10, i=10, w=10)
ZB = ps.build("zb", 4, 8)


def test_a_late_link_that_makes_no_step_slower_was_reported_in_full_for_ever() -> None:
    """On a machine without cores to spare that cost a quarter of each step."""
    controller = Controller(Job(COSTS, Configuration(ZB, "frozen", caps=tuple(peaks(ZB, COSTS)))))
    calm = []
    for number in range(80):
        late = 5.0 if number >= 30 else 0.5
        for rank in range(3):
            rows = [(16e3, 30.0 * k, 30.0 * k + late) for k in range(8)]
            controller.feed(Transfers.of((rank, rank + 1), rows))
        controller.feed(IterationEnded(number, 300.0 + number % 3))
        calm.append(controller.is_calm)
    assert all(calm[5:30]), "nothing is late"
    assert not any(calm[31 : 31 + CLOSELY - 3]), "something has turned late"
    assert all(calm[-20:]), "and no step is slower for it"
    controller.feed(IterationEnded(80, 400.0))
    assert controller.is_calm, "one slow step alone, which the ranks' sampler sees, too"
