"""Microbatches from both ends: Chimera, Hanayo, BitPipe and vChimera by one rule, DualPipe and DualPipeV by phases.

Chimera (Li and Hoefler 2021), Hanayo (Liu et al. 2023), BitPipe (Wu et al. 2024) and vChimera (FlexPipe, 7.1) go
backwards first, deepest stage first, p in flight. What tells them apart is where their stages lie. In each, a
backward goes before a forward, a stage nearer to the loss before one further from it, and a W runs when nothing else
can. p microbatches are in flight, an equal share of them in each pipeline, from the F of its first stage to the end
of that stage's B or W. So no rank holds more than p full activations.

The order is the one in which the ops run where each takes a unit of time. With N a multiple of p (other numbers
leave the last round of microbatches partly empty) and X the schedule's own factor, the bubble is

    X (f + (b - f) N/p)    with whole backwards and b >= f: X at F = B, and at B = 2F X more for each round
    X/2                    with split backwards and f = i = w = 1

In DualPipe and DualPipeV (DeepSeek-V3 technical report, 2024) two streams of microbatches meet. Every rank hosts two
stages, one near the input and one near the loss of a pipeline (`near` and `far` below), and runs a forward of one
beside a backward of the other. With `overlap` the two are a pair, one op with a time of its own (`schedule.pairs`),
as in the original; without, ops of their own, F before B, which is what its code runs where nothing overlaps them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from penstock.cost import Costs
from penstock.library.options import Backward, at_least, check_backward, whole_multiple, yes_or_no
from penstock.schedule import Op, Placement, Schedule
from penstock.schedule.pairs import of_steps
from penstock.schedule.placement import bidirectional, circular, one_to_one, v_shape, wave


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


Side = Literal["near", "far"]
Hosted = Callable[[Side], tuple[int, Callable[[int], int]]]
"""What a rank hosts on a side: the stage, and the microbatch that comes k-th there."""


def dualpipe(num_ranks: int, num_microbatches: int, overlap: bool = False) -> Schedule:
    """Two pipelines, one down the ranks and one up: rank i hosts stage i of one, stage p - 1 - i of the other.

    Even microbatches go down, odd ones up. Two ranks, eight microbatches:

        rank 0 | 0F0 1F1 0F2 1B1 1F3 0B0 0F4 1B3 1F5 0B2 0F6 1B5 1F7 0B4 1B7 0I6 0W6
        rank 1 | 0F1 1F0 0F3 1B0 1F2 0B1 0F5 1B2 1F4 0B3 0F7 1B4 1F6 0B5 1B6 0I7 0W7

    Bubble (p/2 - 1)(f + i - w) where w <= i <= f <= i + w; peak p + 1 activations. The bubble in the authors'
    README counts an F beside a B as one op of its own length. The gradients of the two copies of a stage add up.
    Needs an even p. With an odd N, or N < 2p, it is the order of the next N that is neither, with some microbatches
    missing; its bubble is longer.

    Args:
        overlap: whether forwards and backwards are pairs where the original overlaps them.
    """
    yes_or_no("dualpipe", "overlap", overlap)
    whole_multiple("dualpipe", "ranks", num_ranks, "pipelines", 2)
    last, made = num_ranks - 1, max(num_microbatches + num_microbatches % 2, 2 * num_ranks)
    rows = []
    for rank in range(num_ranks):

        def hosted(side: Side, rank: int = rank) -> tuple[int, Callable[[int], int]]:
            down = (side == "near") == (rank < num_ranks // 2)
            return (rank, lambda k: 2 * k) if down else (last - rank, lambda k: 2 * k + 1)

        rows.append(_eight_phases(hosted, min(rank, last - rank), num_ranks // 2, made // 2, overlap))
    down = tuple(range(num_ranks))
    pipelines = tuple(m % 2 for m in range(num_microbatches))
    missing = (made - num_microbatches) // 2 * 2  # an even number, so that even microbatches still go down
    order, pairs = of_steps(_only(rows, range(missing, missing + num_microbatches)))
    return Schedule("dualpipe", Placement((down, down[::-1])), order, pipelines, pairs=pairs)


def dualpipe_v(num_ranks: int, num_microbatches: int, overlap: bool = False) -> Schedule:
    """DualPipe cut in half: one pipeline in a V, stages i and 2p - 1 - i on rank i, so no stage is there twice.

    Two ranks, stages 0 1 1 0 going down and up:

        rank 0 | 0F0 0F1 0F2 .   3F0 3I0 3W0 3F1 0F3 3B1 ...
        rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 ...

    Bubble (p - 1)(f + i - w) in stage times where w <= i <= f <= i + w and N >= 2p; peak 2p + 1 stage activations.
    With a smaller N it is the order of 2p with the first microbatches missing, and the bubble is longer.

    With `overlap`, as torch writes it (OVERLAP_F_B):

        rank 0 | 0F0 0F1 0F2 .   3F0 3I0 3W0 3F1 0F3+3B1 3F2+0B0 ...
        rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 ...

    Args:
        overlap: whether forwards and backwards are pairs where the original overlaps them.
    """
    yes_or_no("dualpipe-v", "overlap", overlap)
    made = max(num_microbatches, 2 * num_ranks)
    rows = []
    for rank in range(num_ranks):

        def hosted(side: Side, rank: int = rank) -> tuple[int, Callable[[int], int]]:
            return (rank if side == "near" else 2 * num_ranks - 1 - rank), lambda k: k

        rows.append(_eight_phases(hosted, rank, num_ranks, made, overlap))
    order, pairs = of_steps(_only(rows, range(made - num_microbatches, made)))
    return Schedule("dualpipe-v", v_shape(num_ranks), order, (0,) * num_microbatches, pairs=pairs)


def _only(rows: Iterable[Iterable[Sequence[Op]]], kept: range) -> list[list[list[Op]]]:
    """The rows without the ops of microbatches that are not kept; those of `kept` are numbered from 0."""
    return [
        [[Op(kind, stage, kept.index(m)) for kind, stage, m in step if m in kept] for step in row] for row in rows
    ]


def _eight_phases(
    hosted: Hosted, place: int, depth: int, num_microbatches: int, overlap: bool
) -> list[tuple[Op, ...]]:
    """One rank's row, the two of a pair at once: `place` ranks lie between it and the ends, `depth` ranks make half a
    round trip.

    Each side gets `num_microbatches`. A backward is split where its W can fill a bubble; a W that waits is run
    in the order in which its I ran.
    """
    row: list[tuple[Op, ...]] = []
    count = {(kind, side): 0 for kind in "FB" for side in ("near", "far")}
    late: deque[tuple[Op, ...]] = deque()

    def forward(side: Side) -> None:
        stage, nth = hosted(side)
        row.append((Op("F", stage, nth(count["F", side])),))
        count["F", side] += 1

    def backward(side: Side, split: bool = False) -> None:
        stage, nth = hosted(side)
        m = nth(count["B", side])
        count["B", side] += 1
        row.append((Op("I" if split else "B", stage, m),))
        if split:
            late.append((Op("W", stage, m),))

    def both(side: Side, other: Side, together: bool = True) -> None:
        """A forward on one side beside a backward on the other."""
        forward(side)
        backward(other)
        if overlap and together:
            row[-2:] = [(*row[-2], *row[-1])]

    below, above = depth - place - 1, place + 1
    for _ in range(2 * below):
        forward("near")
    for _ in range(above):
        forward("near")
        forward("far")
    for _ in range(below):
        backward("far", split=True)
        row.append(late.popleft())
        forward("far")
    for k in range(num_microbatches - 2 * depth + above):
        # The first of the ranks in the middle, where a pair would start late: the backward is of the forward before.
        both("near", "far", together=k > 0 or below > 0)
        both("far", "near")
    for _ in range(below):
        backward("far")
        both("far", "near")
    for k in range(2 * above):
        backward("near" if k % 2 else "far", split=k >= above)
    for _ in range(below):
        row.append(late.popleft())
        backward("near", split=True)
    row += late
    return row
