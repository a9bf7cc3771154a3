"""Runners kept from one choice to the next, since the same few schedules are simulated again and again."""

from __future__ import annotations

from functools import lru_cache

from penstock.cost import Costs, LinkCondition, Links
from penstock.cost.over_time import Constant
from penstock.dispatch import Dispatch
from penstock.planning import slow_link_schedule
from penstock.schedule import Schedule
from penstock.schedule.send_recv import remove_communication
from penstock.simulation.lowered import Order
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Blocking, Decoupled


@lru_cache(maxsize=16)
def runner_of(costs: Costs) -> Runner:
    """The runner for these costs. It is compiled if numba is loaded already, see `load`."""
    return Runner(costs)


def order_of(schedule: Schedule, costs: Costs) -> Order:
    """A schedule as arrays. Raises CostError and ScheduleError, as `Runner.order`."""
    return runner_of(costs).order(remove_communication(schedule))


def load() -> None:
    """Loads compiled code, once per process. From then on trials run compiled, several times as fast.

    It takes about a second. The first time on a machine it compiles, for some 20 seconds. It is optional: the same
    code runs uncompiled. A job may call it in a thread of its own while it starts.
    """
    costs = Costs.uniform(2)
    schedule = slow_link_schedule(costs, 2)
    runner = Runner(costs, compile=True)
    order = runner.order(schedule)
    for links in (Links({(0, 1): 1.0}), Links({(0, 1): LinkCondition(Constant(1.0), Constant(1.0))})):
        for transport in (Blocking(1), Decoupled()):
            runner.run(order, links, dispatch=Dispatch.DYNAMIC, transport=transport, caps=order.peaks)
    slow_link_schedule(costs, 2, prove=False)
