"""A recorded run as a schedule with costs, replica by replica: what the planner and the simulator take.

fit = fitted(run, effects)
fit.schedule                        the order that ran, and the library's name for it where it has one
fit.costs(step, replica)            ps.Costs with every op's own time
fit.links                           ps.Links: the median of each
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.analyze.effects import Effects
from penstock.analyze.replayed_run import ReplayedRun
from penstock.cost import Costs, Links
from penstock.engine.network import Array
from penstock.formats.traces.run_trace import Scope
from penstock.library import build
from penstock.schedule import Op, Placement, Schedule, ScheduleError, check

NAMED = ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b", "looped-bfs", "v-half", "v-min")
"""Library schedules in which a recorded order is looked up."""
ROWS = {"F": "f", "B": "b", "I": "i", "W": "w"}


@dataclass(frozen=True, eq=False)
class FittedPipelines:
    """A run's pipelines.

    Attributes:
        schedule: the order of replica 0 in the first step, its microbatches numbered as they came.
        name: the library's name for that order; "recorded" where it has none.
        links: ms, the median of each link.
        in_flight: the most microbatches that any rank held at once, in activations of one rank's share of the model.
        times: ms of each kind's ops by step, replica, stage and microbatch: (K, D, S, N).
        factors: of microbatches as `effects` has them, by step and replica, numbered as in the schedule: (K, D, N).
        workers: how many times as long as its like each worker takes, by replica and rank, (D, P).
    """

    schedule: Schedule
    name: str
    links: Links
    in_flight: float
    times: dict[str, Array]
    factors: Array
    workers: Array

    def costs(self, step: int, replica: int, scale: Array = 1.0) -> Costs:
        """What each op of a replica took in a step; with a factor for each microbatch, (N,)."""
        return _costs({letter: rows[step, replica] * scale for letter, rows in self.times.items()})

    def even_costs(self) -> Costs:
        """Every op as long as the mean of its kind over stages, replicas and steps."""
        return _costs({letter: np.full(rows.shape[2:], rows.mean()) for letter, rows in self.times.items()})

    def costs_of(self, schedule: Schedule, step: int, replica: int) -> Costs:
        """What they would take in another schedule of the same ranks.

        The model is cut into its stages, each recorded stage in equal parts. Slow workers stay where they are, and
        a rank's share of the model weighs 1.
        """
        parts = schedule.num_stages // self.schedule.num_stages
        worker = self.workers[replica]
        before = worker[list(self.schedule.placement.pipelines[0])]
        after = worker[list(schedule.placement.pipelines[0])]
        rows = {}
        for letter, values in self.times.items():
            plain = values[step, replica] / before[:, None] / parts
            rows[letter] = np.repeat(plain, parts, axis=0) * after[:, None]
        return _costs(rows, 1 / parts)


def fitted(run: ReplayedRun, effects: Effects) -> FittedPipelines | None:
    """The pipelines of a run; None where replicas or steps differ in their orders, or stages move between ranks."""
    table = run.table
    compute = np.flatnonzero(table.is_scope(Scope.COMPUTE))
    letters = table.letters()
    if not set(letters[compute].tolist()) <= ROWS.keys():
        return None
    num_stages, num_replicas = table.trace.num_stages, table.trace.num_replicas
    place = np.full((num_replicas, num_stages), -1)
    place[table.replica[compute], table.stage[compute]] = table.rank[compute]
    moved = place[table.replica[compute], table.stage[compute]] != table.rank[compute]
    if moved.any() or (place != place[0]).any():
        return None
    first = compute[(letters[compute] == "F") & (table.stage[compute] == 0)]
    numbers = []
    for replica in range(num_replicas):
        here = first[table.replica[first] == replica]
        numbers.append(table.microbatch[here[np.argsort(table.start[0, here])]].tolist())
    if len({len(each) for each in numbers}) > 1:
        return None
    number = [{microbatch: place for place, microbatch in enumerate(each)} for each in numbers]
    num_microbatches = len(numbers[0])
    orders = set()
    for net in run.networks:
        start = table.start[net.steps[0]]
        for replica in range(num_replicas):
            here = compute[table.replica[compute] == replica]
            here = here[np.argsort(start[here], kind="stable")]
            rows: list[list[Op]] = [[] for _ in range(table.trace.num_ranks)]
            for op in here.tolist():
                microbatch = number[replica][int(table.microbatch[op])]
                rows[table.rank[op]].append(Op(str(letters[op]), int(table.stage[op]), microbatch))
            orders.add(tuple(map(tuple, rows)))
    if len(orders) > 1:
        return None
    placement = Placement((tuple(place[0].tolist()),))
    schedule = Schedule.of("recorded", placement, orders.pop(), num_microbatches)
    try:
        check(schedule)
    except ScheduleError:
        return None
    times = {}
    for letter in set(letters[compute].tolist()):
        ops = compute[letters[compute] == letter]
        rows_of = np.zeros((len(table.steps), num_replicas, num_stages, num_microbatches))
        ids = [number[d][m] for d, m in zip(table.replica[ops].tolist(), table.microbatch[ops].tolist())]
        rows_of[:, table.replica[ops], table.stage[ops], ids] = run.own.ops[:, ops]
        times[letter] = rows_of
    factors = np.stack([effects.by_microbatch[:, d, numbers[d]] for d in range(num_replicas)], axis=1)
    return FittedPipelines(
        schedule, _name(schedule), _links(run), most_held(schedule), times, factors, effects.by_worker
    )


def _costs(rows: dict[str, Array], activation: float = 1.0) -> Costs:
    """Costs by microbatch from ms by stage and microbatch of each kind, (S, N)."""
    given = {ROWS[letter]: values.tolist() for letter, values in rows.items()}
    if "b" in given and "i" not in given:  # nothing is known of the halves, and a schedule that needs them halves it
        halves = (rows["B"] / 2).tolist()
        given |= {"i": halves, "w": halves}
    elif "w" not in given:
        given["w"] = [[0.0] * len(row) for row in given["i"]]
    return Costs.by_microbatch(**given, activation=[activation] * len(given["f"]))


def _links(run: ReplayedRun) -> Links:
    table, sent = run.table, run.messages
    source, target = table.rank[sent.producer], table.rank[sent.consumer]
    ways = sorted(set(zip(source.tolist(), target.tolist())))
    return Links({
        (a, b): float(np.median(run.own.messages[:, (source == a) & (target == b)])) for a, b in ways
    })  # fmt: skip


def most_held(schedule: Schedule) -> float:
    """The most that any rank holds, in its share of the model's activations."""
    share = schedule.num_ranks / schedule.num_stages
    most = 0.0
    for row in schedule.order:
        frees = "W" if any(op.kind == "W" for op in row) else "B"
        held = 0.0
        for op in row:
            held += share if op.kind == "F" else -share if op.kind == frees else 0.0
            most = max(most, held)
    return most


def _name(schedule: Schedule) -> str:
    for name in NAMED:
        try:
            known = build(name, schedule.num_ranks, schedule.num_microbatches)
        except ScheduleError:
            continue
        if known.order == schedule.order and known.placement == schedule.placement:
            return name
    return "recorded"


def named(fit: FittedPipelines) -> Schedule:
    """The schedule under the name by which people know it."""
    return replace(fit.schedule, name=fit.name)
