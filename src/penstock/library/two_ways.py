"""Chimera (Li and Hoefler 2021), Hanayo (Liu et al. 2023), BitPipe (Wu et al. 2024) and vChimera (FlexPipe, 7.1).

One rule is behind them: backwards first, deepest stage first, p in flight.

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
from penstock.library.options import at_least, whole_multiple
from penstock.schedule import Placement, Schedule, ScheduleError
from penstock.schedule.placement import bidirectional, circular, one_to_one, v_shape, wave

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
    from penstock.program import Program, Rules, depth_first  # here, since other schedules do without

    check_backward(name, backward)
    rules = Rules(
        "backward-first",
        forward=depth_first(),
        backward=depth_first(),
        max_in_flight={0: num_ranks // placement.num_pipelines},
    )
    split, unit = backward == "split", Costs.uniform(placement.num_stages, b=1.0)
    return Program(placement, num_microbatches, rules, split=split, costs=unit, name=name).build()


def chimera(num_ranks: int, num_microbatches: int, backward: Backward = "whole") -> Schedule:
    """Rank i hosts stage i of the one and stage p - 1 - i of the other; even microbatches go down, odd ones up.

        rank 0 | 0F0 0F2 .   3F1 3B1 3F3 3B3 0B0 .   0B2
        rank 1 | .   1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2
        rank 2 | .   1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3
        rank 3 | 0F1 0F3 .   3F0 3B0 3F2 3B2 0B1 .   0B3

    Bubble X = p - 2 stage times, see `deepest_first`: p - 2 at F = B, 2(p - 2) at B = 2F and N = p, (p - 2)/2
    with split backwards. Peak min(p, N) activations. The gradients of the two copies of a stage add up.

    Args:
        backward: "whole", or "split" into I and W.
    """
    whole_multiple("chimera", "ranks", num_ranks, "pipelines", 2)
    placement = bidirectional(one_to_one(num_ranks))
    return deepest_first("chimera", placement, num_ranks, num_microbatches, backward)


def hanayo(num_ranks: int, num_microbatches: int, waves: int = 2, backward: Backward = "whole") -> Schedule:
    """2W stages per rank, down the ranks and back up W times.

    Two ranks, stages 0 1 1 0 0 1 1 0 going down and up twice:

        rank 0 | 0F0 0F1 .   3F0 4F0 3F1 4F1 7F0 7B0 7F1 7B1 4B0 3B0 4B1 3B1 0B0 .   0B1
        rank 1 | .   1F0 2F0 1F1 2F1 5F0 6F0 5F1 6F1 6B0 5B0 6B1 5B1 2B0 1B0 2B1 1B1

    Bubble X = (p - 1)/W in the time that a rank's 2W stages take, 2(p - 1) in stage times, see `deepest_first`:
    with split backwards half of that. Peak 2W min(p, N) stage activations, min(p, N) full ones.

    Args:
        waves: W, 2 by default; with one the placement is that of `zb-v`.
        backward: "whole", or "split" into I and W.
    """
    at_least("hanayo", "waves", waves, 1)
    return deepest_first("hanayo", wave(num_ranks, waves), num_ranks, num_microbatches, backward)


def bitpipe(num_ranks: int, num_microbatches: int, backward: Backward = "whole") -> Schedule:
    """Two interleaved pipelines of 2p stages in opposite directions: stage s on rank s mod p, or that from below.

    Two ranks; pipeline 0 goes 0 1 0 1, pipeline 1 goes 1 0 1 0:

        rank 0 | 0F0 1F1 2F0 3F1 3B1 2B0 1B1 0B0 0F2 1F3 ...
        rank 1 | 0F1 1F0 2F1 3F0 3B0 2B1 1B0 0B1 0F3 1F2 ...

    Bubble X = p - 2 stage times, (p - 2)/2 in full ones, half of Chimera's, see `deepest_first`. Peak 2 min(p, N)
    stage activations, min(p, N) full ones. The gradients of the two copies of a stage add up.

    Args:
        backward: "whole", or "split" into I and W.
    """
    whole_multiple("bitpipe", "ranks", num_ranks, "pipelines", 2)
    placement = bidirectional(circular(num_ranks, 2 * num_ranks))
    return deepest_first("bitpipe", placement, num_ranks, num_microbatches, backward)


def vchimera(num_ranks: int, num_microbatches: int, backward: Backward = "whole") -> Schedule:
    """A V from the first rank down and back, and one from the last rank up and back.

    Two ranks; pipeline 0 goes 0 1 1 0, pipeline 1 goes 1 0 0 1:

        rank 0 | 0F0 1F1 2F1 3F0 3B0 2B1 1B1 0B0 0F2 1F3 ...
        rank 1 | 0F1 1F0 2F0 3F1 3B1 2B0 1B0 0B1 0F3 1F2 ...

    Bubble, peak and options are those of `bitpipe`; a V saves the message between its two middle stages.
    """
    whole_multiple("vchimera", "ranks", num_ranks, "pipelines", 2)
    placement = bidirectional(v_shape(num_ranks))
    return deepest_first("vchimera", placement, num_ranks, num_microbatches, backward)
