"""The one rule behind Chimera, Hanayo, BitPipe and vChimera: backwards first, deepest stage first, p in flight.

What tells these schedules apart is where their stages lie. In each, a backward goes before a forward, a stage
nearer to the loss before one further from it, and a W runs when nothing else can. p microbatches are in flight,
an equal share of them in each pipeline, from the F of its first stage to the end of that stage's B or W. So no
rank holds more than p full activations.

The order is the one in which the ops run where each takes a unit of time. With N a multiple of p (other numbers
leave the last round of microbatches partly empty) and X the schedule's own factor, the bubble is

    X (f + (b - f) N/p)    with whole backwards and b >= f: X at F = B, and at B = 2F X more for each round
    X/2                    with split backwards and f = i = w = 1
"""

from __future__ import annotations

from typing import Literal, get_args

from penstock.cost import Costs
from penstock.program import Program, Rules, depth_first
from penstock.schedule import Placement, Schedule, ScheduleError

Backward = Literal["whole", "split"]


def check_backward(name: str, backward: object) -> None:
    """Raises ScheduleError where that is neither "whole" nor "split"."""
    if backward not in get_args(Backward):
        raise ScheduleError(f"{name}: backward is {backward!r}; give 'whole' or 'split'", rule="options")


def deepest_first(
    name: str, placement: Placement, num_ranks: int, num_microbatches: int, backward: Backward
) -> Schedule:
    """The schedule by this rule; microbatch m goes to pipeline m mod the number of pipelines.

    Raises:
        ScheduleError: `backward` is neither "whole" nor "split".
    """
    check_backward(name, backward)
    rules = Rules(
        "backward-first",
        forward=depth_first(),
        backward=depth_first(),
        max_in_flight={0: num_ranks // placement.num_pipelines},
    )
    split, unit = backward == "split", Costs.uniform(placement.num_stages, b=1.0)
    return Program(placement, num_microbatches, rules, split=split, costs=unit, name=name).build()
