"""A recorded run as a schedule with costs, replica by replica: what the planner and the simulator take.

fit = fitted(run, effects)
fit.schedule                        the order that ran, and the library's name for it where it has one
fit.costs(step, replica)            ps.Costs with every op's own time
fit.links                           ps.Links: the median of each
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from penstock.analyze.effects import Effects
from penstock.analyze.messages import BACKWARDS
from penstock.analyze.replayed_run import ReplayedRun
from penstock.analyze.step_network import groups
from penstock.analyze.whole import Steps
from penstock.cost import Costs, Links
from penstock.engine.network import Array
from penstock.formats.traces.run_trace import NONE, Scope
from penstock.library import build
from penstock.schedule import Op, Placement, Schedule, ScheduleError, check, declare_order

NAMED = ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b", "looped-bfs", "v-half", "v-min", "mllm")
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
    """The pipelines of a run.

    None where replicas or steps differ in their orders, stages move between ranks, or some ranks run some of a shared
    stage's ops alone.
    """
    table = run.table
    compute = np.flatnonzero(table.is_scope(Scope.COMPUTE))
    letters = table.letters()
    if not set(letters[compute].tolist()) <= ROWS.keys():
        return None
    num_stages, num_replicas = table.trace.num_stages, table.trace.num_replicas
    hosts = _hosts(table, compute)
    if hosts is None:
        return None
    first = compute[(letters[compute] == "F") & (table.stage[compute] == 0)]
    numbers = []
    for replica in range(num_replicas):
        here = first[table.replica[first] == replica]
        began = table.microbatch[here[np.argsort(table.start[0, here], kind="stable")]].tolist()
        numbers.append(list(dict.fromkeys(began)))  # once, however many ranks share the stage
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
    shared = tuple((stage, ranks) for stage, ranks in enumerate(hosts) if len(ranks) > 1)
    placement = Placement((tuple(ranks[0] for ranks in hosts),), shared)
    schedule = Schedule.of("recorded", placement, orders.pop(), num_microbatches)
    ops = (op for row in schedule.order for op in row)
    backwards = [op.microbatch for op in ops if op.stage == num_stages - 1 and op.kind in BACKWARDS]
    try:
        if backwards != sorted(backwards):  # torch's looped BFS runs the last microbatch's first
            schedule = declare_order(schedule, backward=list(dict.fromkeys(backwards)))
        check(schedule)
    except ScheduleError:
        return None
    times = {}
    for letter in set(letters[compute].tolist()):
        ops = compute[letters[compute] == letter]
        shape = num_replicas, num_stages, num_microbatches
        ids = [number[d][m] for d, m in zip(table.replica[ops].tolist(), table.microbatch[ops].tolist())]
        place = np.ravel_multi_index((table.replica[ops], table.stage[ops], np.array(ids)), shape)
        slowest = np.zeros((len(table.steps), int(np.prod(shape))))
        for in_step, taken in zip(slowest, run.own.ops[:, ops]):
            np.maximum.at(in_step, place, taken)  # of ranks that share an op the slowest says how long it takes
        times[letter] = slowest.reshape(len(table.steps), *shape)
    factors = np.stack([effects.by_microbatch[:, d, numbers[d]] for d in range(num_replicas)], axis=1)
    return FittedPipelines(
        schedule, _name(schedule), _links(run), most_held(schedule), times, factors, effects.by_worker
    )


def _hosts(table: Steps, compute: Array) -> list[tuple[int, ...]] | None:
    """The ranks of each stage; None where not all of them run all its microbatches, alike in every replica."""
    ran: dict[tuple[int, int], Counter[int]] = {}
    for op in compute.tolist():
        ran.setdefault((int(table.stage[op]), int(table.replica[op])), Counter())[int(table.rank[op])] += 1
    found, shared = [], groups(table)
    for stage in range(table.trace.num_stages):
        each = [ran[stage, replica] for replica in range(table.trace.num_replicas)]
        members = shared[compute[table.stage[compute] == stage]]
        together = len(each[0]) == 1 or (members != NONE).all()
        if not together or any(own.keys() != each[0].keys() or len(set(own.values())) > 1 for own in each):
            return None
        found.append(tuple(sorted(each[0])))
    return found


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
