"""The simulated parts of the protocol: python -m experiments.uneven.simulated PART ...

Each part takes some seconds to some minutes of one core and writes results/PART.json. `--cell N` runs one cell of it
and adds it to what is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np

import penstock as ps
from experiments.common.command import options
from experiments.uneven import protocol
from experiments.uneven.captioned import CaptionedStep
from experiments.uneven.record import add_cell
from penstock.dispatch import Dispatch
from penstock.planning import assign_evenly, order_microbatches, plan_batch
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Decoupled

MOVES_S = 60.0
"""More than 300 moves take."""


def makespan(schedule: ps.Schedule, costs: ps.Costs, dispatch: Dispatch, caps: tuple[float, ...]) -> float:
    runner = Runner(costs)
    ran = runner.run(runner.order(schedule), ps.Links(), dispatch=dispatch, transport=Decoupled(), caps=caps)
    return float(ran.makespan)


def order(cell: protocol.Cell) -> list[list[float]]:
    """Of each draw: arrival over planned by rules, and after moves."""
    schedule = ps.build(cell.name, cell.num_ranks, 4 * cell.num_ranks)
    even, found = protocol.even_costs(schedule), []
    for draw in range(protocol.NUM_DRAWS):
        costs = replace(even, uneven=protocol.factors(cell.sigma, 4 * cell.num_ranks, draw))
        rules = order_microbatches(schedule, costs)
        moved = order_microbatches(schedule, costs, time_limit=MOVES_S)
        found.append([rules.arrival / rules.makespan, moved.arrival / moved.makespan])
    return found


def in_bytes(cell: protocol.Cell) -> list[list[float]]:
    """As `order`, with activations as long as times, and the largest peak of arrival as every rank's cap."""
    schedule = ps.build(cell.name, cell.num_ranks, 4 * cell.num_ranks)
    even, found = protocol.even_costs(schedule), []
    for draw in range(protocol.NUM_DRAWS):
        each = protocol.factors(cell.sigma, 4 * cell.num_ranks, draw)
        costs = replace(even, uneven={"time": each, "activation": each})
        cap = max(Runner(costs).order(schedule).peaks)
        rules = order_microbatches(schedule, costs, memory_limit=cap)
        moved = order_microbatches(schedule, costs, memory_limit=cap, time_limit=MOVES_S)
        found.append([rules.arrival / rules.makespan, moved.arrival / moved.makespan])
    return found


def errors(cell: protocol.Cell) -> list[list[float]]:
    """Of each draw: the time of what was planned over predicted factors, run over the real ones, over arrival's."""
    schedule = ps.build(cell.name, cell.num_ranks, 4 * cell.num_ranks)
    even, found = protocol.even_costs(schedule), []
    for draw in range(protocol.NUM_DRAWS):
        each = protocol.factors(cell.sigma, 4 * cell.num_ranks, draw)
        real, thought = (replace(even, uneven=f) for f in (each, protocol.predicted(each, cell.sigma, draw)))
        planned = order_microbatches(schedule, thought, noise=protocol.NOISE)
        took = makespan(planned.schedule, real, planned.dispatch, planned.caps)
        found.append([took / makespan(schedule, real, Dispatch.FROZEN, planned.caps)])
    return found


def changed(cell: protocol.Cell) -> list[list[float]]:
    """Of each draw: 1f1b frozen in order of arrival over the other schedule planned, at 1f1b's memory by count."""
    before, after = (ps.build(name, cell.num_ranks, 4 * cell.num_ranks) for name in ("1f1b", cell.name))
    cap = max(ps.simulate(before, protocol.even_costs(before)).peak_activations)
    found = []
    for draw in range(protocol.NUM_DRAWS):
        each = protocol.factors(cell.sigma, 4 * cell.num_ranks, draw)
        was, now = (replace(protocol.even_costs(schedule), uneven=each) for schedule in (before, after))
        arrival = makespan(before, was, Dispatch.FROZEN, (cap,) * cell.num_ranks)
        planned = order_microbatches(after, now, memory_limit=cap)
        found.append([arrival / planned.makespan])
    return found


def towers(cell: protocol.Towers) -> list[list[float]]:
    """Of each draw: 1f1b frozen in order of arrival over planned by rules and after moves, and over its work."""
    num = 4 * cell.num_ranks
    before = ps.build("1f1b", cell.num_ranks, num)
    cap: float | None = max(ps.simulate(before, protocol.even_costs(before)).peak_activations)
    after, costs_of = before, protocol.tower_costs
    if cell.how == "order":
        cap = None
    elif cell.how == "changed":
        after = ps.build("zb-v", cell.num_ranks, num)
    else:
        after, costs_of = protocol.spread(cell.num_ranks, num), protocol.spread_costs
    found = []
    for draw in range(protocol.NUM_DRAWS):
        each = protocol.tower_factors(cell.sigma, num, draw)
        was, now = protocol.tower_costs(before, *each), costs_of(after, *each)
        arrival = ps.simulate(before, was)
        rules = order_microbatches(after, now, memory_limit=cap)
        moved = order_microbatches(after, now, memory_limit=cap, time_limit=MOVES_S)
        over_work = arrival.makespan * cell.num_ranks / sum(arrival.busy)
        found.append([arrival.makespan / rules.makespan, arrival.makespan / moved.makespan, over_work])
    return found


def late_towers(cell: protocol.LateTowers) -> list[list[float]]:
    """Of each draw: 1f1b frozen in order of arrival over the best schedule planned, and over its work."""
    num = 4 * cell.num_ranks
    links = ps.Links(default=cell.latency)
    before = ps.build("1f1b", cell.num_ranks, num)
    cap = cell.memory * max(ps.simulate(before, protocol.even_costs(before)).peak_activations)
    found = []
    for draw in range(protocol.LATE_DRAWS):
        each = protocol.tower_factors(cell.sigma, num, draw)
        arrival = ps.simulate(before, protocol.tower_costs(before, *each), links)
        best = np.inf
        for name in protocol.LATE_SCHEDULES:
            after = ps.build(name, cell.num_ranks, num)
            if max(ps.simulate(after, protocol.even_costs(after)).peak_activations) > cap:
                continue
            costs = protocol.tower_costs(after, *each)
            best = min(best, order_microbatches(after, costs, links=links, memory_limit=cap).makespan)
        found.append([arrival.makespan / best, arrival.makespan * cell.num_ranks / sum(arrival.busy)])
    return found


def captioned(cell: tuple[str, int, int]) -> list[list[float]]:
    """Of each step: how many times as fast it is as it arrives, frozen, and the seconds that the plan took."""
    steps = [CaptionedStep(*cell, step).plan for step in range(protocol.CAPTIONED_STEPS)]
    return [[plan.arrival / plan.makespan, plan.seconds] for plan in steps]


def assigned(cell: protocol.Tail) -> list[list[float]]:
    """Of each step: the busiest replica's work over the mean by arrival and assigned, and how many times as fast."""
    schedule = ps.build(cell.name, protocol.RANKS, protocol.EACH)
    even, found = protocol.even_costs(schedule), []
    for draw in range(protocol.NUM_DRAWS):
        work = np.array(protocol.assigned_work(cell.longest, draw))
        arrived = work.reshape(protocol.REPLICAS, protocol.EACH)
        groups = [work[group] for group in assign_evenly(work, protocol.REPLICAS)]
        sums = np.array([group.sum() for group in groups])
        own = [replace(even, uneven=each.tolist()) for each in arrived]
        caps = tuple(Runner(even).order(schedule).peaks)
        before = max(makespan(schedule, costs, Dispatch.FROZEN, caps) for costs in own)
        after = max(order_microbatches(schedule, replace(even, uneven=each.tolist())).makespan for each in groups)
        busiest = float(arrived.sum(axis=1).max() / arrived.sum(axis=1).mean())
        found.append([busiest, float(sums.max() / sums.mean()), before / after])
    return found


def assigned_limits(cell: protocol.Tail) -> list[list[float]]:
    """Of each step, what no assignment can do better: the busiest replica's work over the mean, and how many times as
    fast a step is whose one slow replica has the longest microbatch beside the shortest ones.

    The first is a bound. For the second the best order of that replica is what rules and moves find.
    """
    schedule = ps.build(cell.name, protocol.RANKS, protocol.EACH)
    even, found = protocol.even_costs(schedule), []
    caps, beside = tuple(Runner(even).order(schedule).peaks), protocol.EACH - 1
    for draw in range(protocol.NUM_DRAWS):
        arrived = np.array(protocol.assigned_work(cell.longest, draw))
        work, own = np.sort(arrived), arrived.reshape(protocol.REPLICAS, protocol.EACH)
        # Of the replicas with the k longest, beside which the shortest of all run.
        busiest = [
            (work[-k:].sum() + work[: k * beside].sum()) / (k * protocol.EACH)
            for k in range(1, protocol.REPLICAS + 1)
        ]
        before = max(makespan(schedule, replace(even, uneven=each.tolist()), Dispatch.FROZEN, caps) for each in own)
        slowest = replace(even, uneven=[*work[:beside].tolist(), float(work[-1])])
        after = order_microbatches(schedule, slowest, time_limit=MOVES_S).makespan
        found.append([float(max(busiest) / work.mean()), before / after])
    return found


def documents(cell: protocol.Tail) -> list[list[float]]:
    """Of each step: the busiest replica's work over the mean as planned, how many times as fast, and the seconds."""
    schedule = ps.build(cell.name, protocol.RANKS, protocol.EACH)
    costs, found = protocol.document_costs(schedule), []
    for draw in range(protocol.DOCUMENT_DRAWS):
        bins = protocol.documents(draw)
        replicas = [bins[k : k + protocol.EACH] for k in range(0, len(bins), protocol.EACH)]
        runs = [ps.simulate(schedule, costs.of(own)) for own in replicas]
        before = max(run.makespan for run in runs)
        cap = max(max(run.peak_activations) for run in runs)
        lengths = [length for own in bins for length in own]
        planned = plan_batch(lengths, schedule, costs, num_replicas=protocol.REPLICAS, memory_limit=cap)
        found.append([planned.busiest, before / planned.makespan, planned.seconds])
    return found


PARTS: dict[str, tuple[Callable[..., list[list[float]]], tuple[object, ...]]] = {
    "order": (order, protocol.ORDER),
    "bytes": (in_bytes, protocol.BYTES),
    "errors": (errors, protocol.ORDER),
    "changed": (changed, protocol.CHANGED),
    "towers": (towers, protocol.TOWERS),
    "late_towers": (late_towers, protocol.LATE_TOWERS),
    "captioned": (captioned, protocol.CAPTIONED),
    "assigned": (assigned, protocol.ASSIGNED),
    "assigned_limits": (assigned_limits, protocol.ASSIGNED),
    "documents": (documents, protocol.DOCUMENTS),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--cell", type=int, help="one cell alone, by its number from 0")
    asked = parser.parse_args()
    for part in asked.parts:
        measure, cells = PARTS[part]
        for number, cell in enumerate(cells):
            if asked.cell in (None, number):
                draws = [[round(float(value), 4) for value in draw] for draw in measure(cell)]
                add_cell(part, number, range(len(draws)), {"cell": cell, "draws": draws})
                print(part, cell, np.round(np.mean(draws, axis=0), 4).tolist(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
