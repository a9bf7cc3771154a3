"""A step of a recorded run as a network of the engine: what each op waited for, and how long each took by itself.

    rank 1     | ag |F0 F1 .. B31| arrive | all together | reduce | ...     a row of the worker
    messages        F0  F1  ..                                              a row each
    stream of 1     reduce 0, reduce 1                                      collectives that run beside the compute

An op that several ranks record for one microbatch of a stage is run by them together, as a collective is.

A message begins when its sender has computed it and its receiver has posted it, and a collective when the last member
has come. What it takes from there on is its own; all before was waiting, and is not counted as its time.

A `ReplayedRun` has the networks of all steps, and runs them again: as they were, with some ops as they should be, or
ideal.

run = ReplayedRun(table)
run.replayed                         each step's time as recorded ops make it, nobody late
run.mean(run.ideal)                  all ops of a kind alike: the study's T_ideal
run.mean(np.where(some, ...))        anything between

The measures of the straggler study (Lin et al., OSDI 2025), and the same by link, run steps so:

S    = T / T_ideal                          how much slower the run is than if all ops of a kind took as long
S_t  = T_ideal with ops of type t / T_ideal  what one type of op does to an ideal run
S_w  = min(S_replica, S_rank)               what one worker does, as the study takes it
M_W  = (T - T_fixed) / (T - T_ideal)        what fixing the 3% of workers with the highest S_w would win back
M_S                                         what fixing the ranks of the last stage would win back
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.analyze.step_table import Messages, StepTable, messages_of
from penstock.engine.network import Array, of_queues
from penstock.engine.sweep import OrderTimes, Timer
from penstock.formats.traces.run_trace import NONE, PARAMETERS, Scope, TraceError


class StepNetwork:
    """The network of those steps of a trace in which ranks ran their ops in one order.

    Queues hold one op each: compute and local ops, what a worker does until a collective begins (its arrival), the
    beginning of collectives, the members' own time in them, and messages.

    Attributes:
        steps: which of the K, in order.
        part: of each queue, what takes its time: one of the M ops of a step, or M + a message; NONE for others.
        needs: of each queue, those that must have ended; besides what the rows say.
    """

    def __init__(self, table: StepTable, messages: Messages, steps: Array) -> None:
        self.steps, self._table, self._start = steps, table, table.start[steps[0]]
        self._parts: list[int] = []
        self._hosts: list[tuple[int, ...]] = []
        self._rows: defaultdict[int, list[int]] = defaultdict(list)
        self.needs: list[list[int]] = []
        self._first, self._last = (np.full(table.num_ops, NONE) for _ in range(2))
        """Of each op, the queue with which it begins, and the one with which it ends."""
        self._join_streams(self._lay_out())
        self._send(messages)
        self.part = np.array(self._parts)
        rows = [self._rows[row] for row in range(max(self._rows) + 1)]
        self._order = np.array([queue for row in rows for queue in row])
        network, irregular = of_queues(
            [1] * len(self.part),
            [0.0] * len(self.part),
            self._hosts,
            [[(before, 0.0, 1, 1) for before in needs] for needs in self.needs],
            len(rows),
        )
        self._timer = Timer(network, irregular)

    def durations(self, own: Array) -> Array:
        """Ms of each queue from those of ops and messages (M + L,)."""
        return np.where(self.part == NONE, 0.0, own[self.part])

    def time(self, durations: Array) -> OrderTimes:
        """When all begins.

        Raises:
            TraceError: ranks would wait for one another; then the order of ops is not what ran.
        """
        timed = self._timer.time(self._order, durations)
        if not timed.complete:
            row = next(r for r, reached in enumerate(timed.reached) if reached < len(self._rows[r]))
            waits = self._rows[row][timed.reached[row] :]
            part = next((self._parts[queue] for queue in waits if self._parts[queue] != NONE), NONE)
            what = self._table.named(part) if 0 <= part < self._table.num_ops else "a message"
            raise TraceError(
                f"{self._table.trace.name}, step {int(self._table.steps[self.steps[0]])}: by the order of ops {what} "
                "waits for what waits for it; do the clocks of hosts differ, or is a rank's file from another run?"
            )
        return timed

    def _lay_out(self) -> dict[int, list[int]]:
        """Puts all ops but messages into rows, and gives the ops of each."""
        table, start = self._table, self._start
        last = np.full(table.num_workers, -np.inf)
        np.maximum.at(last, table.worker[table.compute], start[table.compute])
        beside = table.is_scope(Scope.REPLICAS) & (start < last[table.worker])
        row_of = table.worker + table.num_workers * beside
        order = np.lexsort((table.number, table.kind, start))
        order = order[~table.is_scope(Scope.SEND, Scope.RECEIVE)[order]]
        gangs = {
            group: self._queue(tuple(np.unique(row_of[table.groups == group]).tolist()))
            for group in np.unique(table.groups[table.groups != NONE]).tolist()
        }
        by_row = {row: order[row_of[order] == row].tolist() for row in np.unique(row_of[order]).tolist()}
        for row, ops in by_row.items():
            for op in ops:
                group = int(table.groups[op])
                if group == NONE:
                    self._first[op] = self._last[op] = self._add(row, op)
                    continue
                self._first[op] = self._add(row)
                self._rows[row].append(gangs[group])
                self._last[op] = self._add(row, op)
        return by_row

    def _queue(self, rows: tuple[int, ...], part: int = NONE) -> int:
        self._parts.append(part)
        self._hosts.append(rows)
        self.needs.append([])
        return len(self._parts) - 1

    def _add(self, row: int, part: int = NONE) -> int:
        queue = self._queue((row,), part)
        self._rows[row].append(queue)
        return queue

    def _join_streams(self, by_row: dict[int, list[int]]) -> None:
        """What runs beside the compute waits for its stage's last op, or its stage's first op waits for it."""
        table, start = self._table, self._start
        is_compute = table.is_scope(Scope.COMPUTE)
        for worker in range(table.num_workers):
            stream, row = by_row.get(table.num_workers + worker, []), by_row.get(worker, [])
            if not stream:
                continue
            computed = [op for op in row if is_compute[op]]
            for op in stream:
                known = [each for each in computed if table.stage[op] in (NONE, table.stage[each])]
                is_before = table.trace.kinds[table.kind[op]].name == PARAMETERS or start[op] < start[computed[0]]
                if table.stage[op] == NONE and not is_before:
                    known = [each for each in computed if start[each] < start[op]]
                if known and is_before:
                    self.needs[self._first[known[0]]].append(int(self._last[op]))
                elif known:
                    self.needs[self._first[op]].append(int(self._last[known[-1]]))
            after = [op for op in row if start[op] > start[computed[-1]]]
            if after:
                self.needs[self._first[after[0]]].append(int(self._last[stream[-1]]))

    def _send(self, messages: Messages) -> None:
        """Messages, each in a row of its own. One waits for others only if its receive was posted after their ops."""
        ends = zip(messages.producer.tolist(), messages.consumer.tolist(), messages.posted.tolist())
        for place, (producer, consumer, posted) in enumerate(ends):
            queue = self._add(2 * self._table.num_workers + place, self._table.num_ops + place)
            self.needs[queue] += [int(self._last[op]) for op in (producer, posted) if op != NONE]
            self.needs[self._first[consumer]].append(queue)


def own_times(table: StepTable) -> Array:
    """Ms that each op took by itself, waiting for others left out, (K, M)."""
    own = table.end - table.start
    for group in np.unique(table.groups[table.groups != NONE]).tolist():
        members = np.flatnonzero(table.groups == group)
        came = table.start[:, members].max(axis=1, keepdims=True)
        own[:, members] = np.maximum(table.end[:, members] - came, 0.0)
    return own


def networks(table: StepTable, messages: Messages) -> list[StepNetwork]:
    """One for all steps in which ranks ran their ops in the same order; most traces have one."""
    alike: defaultdict[bytes, list[int]] = defaultdict(list)
    for step, start in enumerate(table.start):
        # Where no time passes between ops their order is that of the table.
        order = np.lexsort((start[table.compute], table.worker[table.compute]))
        alike[order.tobytes()].append(step)
    return [StepNetwork(table, messages, np.array(steps)) for steps in alike.values()]


FORWARD_MESSAGES, BACKWARD_MESSAGES = "forward-pp-comm", "backward-pp-comm"


class ReplayedRun:
    """The steps of a run, each as a network of the engine over the times that its ops and messages took.

    Ops and messages are parts of a step: its M ops come first, its L messages follow.

    Attributes:
        table: the steps. messages: between ranks.
        own: ms that each part took by itself, (K, M + L).
        kinds: names of the kinds of parts: those of ops, then those of messages.
        kind, replica, rank: of each part; of a message those of its receiver, (M + L,).
    """

    def __init__(self, table: StepTable) -> None:
        self.table = table
        self.messages = messages_of(table)
        self.own: Array = np.hstack([own_times(table), self.messages.own])
        self.networks: list[StepNetwork] = networks(table, self.messages)
        self.kinds = (*(kind.name for kind in table.trace.kinds), FORWARD_MESSAGES, BACKWARD_MESSAGES)
        self.kind = np.append(table.kind, len(table.trace.kinds) + ~self.forward)
        self.replica, self.rank = (
            np.append(column, column[self.messages.consumer]) for column in (table.replica, table.rank)
        )

    @cached_property
    def forward(self) -> Array:
        """Whether each message is an activation; a gradient otherwise (L,)."""
        return self.table.letters[self.messages.producer] == "F"

    @cached_property
    def is_message(self) -> Array:
        """Whether each part is a message (M + L,)."""
        return np.arange(len(self.kind)) >= self.table.num_ops

    @cached_property
    def measured(self) -> Array:
        """Each step's time as recorded (K,)."""
        return self.table.end.max(axis=1)

    @cached_property
    def replayed(self) -> Array:
        """Each step's time as the recorded ops make it, each started as soon as it could (K,)."""
        return self.times(self.own)

    @cached_property
    def ideal(self) -> Array:
        """All compute ops of a kind as long as their mean, all communication as its median, as in the study."""
        own = self.own.copy()
        are_communication = [*(kind.is_communication for kind in self.table.trace.kinds), True, True]
        for number, is_communication in enumerate(are_communication):
            alike = self.kind == number
            if alike.any():
                own[:, alike] = np.median(own[:, alike]) if is_communication else own[:, alike].mean()
        return own

    @cached_property
    def ideal_time(self) -> float:
        """Ms of a step whose ops are ideal, the same for all that have the same order: their mean."""
        one = [self._time(net, self.ideal[net.steps[0]]) * len(net.steps) for net in self.networks]
        return sum(one) / len(self.table.steps)

    def times(self, own: Array) -> Array:
        """Ms of each step over what its parts take (K,)."""
        found = np.zeros(len(own))
        for net in self.networks:
            found[net.steps] = [self._time(net, own[step]) for step in net.steps]
        return found

    def mean(self, own: Array) -> float:
        """The mean over all steps, ms."""
        return float(self.times(own).mean())

    def won(self, own: Array) -> float:
        """By how many ms the mean step would be shorter."""
        return float(self.replayed.mean()) - self.mean(own)

    def _time(self, net: StepNetwork, own: Array) -> float:
        return net.time(net.durations(own)).makespan


MOST_WORKERS = 0.03
"""The share of workers that M_W fixes."""


@dataclass(frozen=True)
class StudyMetrics:
    """Slowdowns of a run.

    Attributes:
        measured, replayed, ideal: mean ms of a step: as recorded; as its ops make it; with all ops of a kind alike.
        slowdown: S, `replayed / ideal`.
        launch_slowdown: `measured / replayed`: what starting ops late costs.
        replay_error: median over steps of `|replayed - measured| / measured`.
        by_kind: S_t by the trace's name for the kind of op.
        by_replica, by_rank: what each replica, and each rank over all of them, does to an ideal run.
        by_worker: S_w by replica and rank, like "0:3".
        by_link: what each directed pair of ranks, like "2>3", does to an ideal run, over all replicas.
        worst_workers: M_W; last_stage: M_S; 0 where nothing is slower than ideal.
    """

    measured: float
    replayed: float
    ideal: float
    slowdown: float
    launch_slowdown: float
    replay_error: float
    by_kind: dict[str, float]
    by_replica: dict[int, float]
    by_rank: dict[int, float]
    by_worker: dict[str, float]
    by_link: dict[str, float]
    worst_workers: float
    last_stage: float


def study_metrics(run: ReplayedRun) -> StudyMetrics:
    """All of them, each by running the steps again."""
    table, sent = run.table, run.messages
    measured, replayed = float(run.measured.mean()), float(run.replayed.mean())
    ideal = run.ideal_time

    def added(parts: Array) -> float:
        """The slowdown of an ideal run in which these parts are as they were."""
        if np.array_equal(run.own[:, parts], run.ideal[:, parts]):
            return 1.0
        return run.mean(np.where(parts, run.own, run.ideal)) / ideal

    def won_back(parts: Array) -> float:
        return 0.0 if replayed <= ideal else run.won(np.where(parts, run.ideal, run.own)) / (replayed - ideal)

    is_end = [*(kind.scope.is_message for kind in table.trace.kinds), False, False]
    by_kind = {
        name: added(run.kind == number)
        for number, name in enumerate(run.kinds)
        if not is_end[number] and (run.kind == number).any()
    }
    by_replica = {replica: added(run.replica == replica) for replica in range(table.trace.num_replicas)}
    by_rank = {rank: added(run.rank == rank) for rank in range(table.trace.num_ranks)}
    by_worker = {
        (replica, rank): min(by_replica[replica], by_rank[rank]) for replica in by_replica for rank in by_rank
    }
    source = np.full(len(run.rank), NONE)
    source[run.is_message] = table.rank[sent.producer]
    ways = sorted(set(zip(table.rank[sent.producer].tolist(), table.rank[sent.consumer].tolist())))
    by_link = {f"{a}>{b}": added((source == a) & (run.rank == b)) for a, b in ways}
    most = math.ceil(MOST_WORKERS * len(by_worker))
    worst = sorted(by_worker, key=lambda worker: (-by_worker[worker], worker[1], worker[0]))[:most]
    is_worst = np.any([(run.replica == replica) & (run.rank == rank) for replica, rank in worst], axis=0)
    last = table.rank[table.compute][table.stage[table.compute] == table.trace.num_stages - 1]
    return StudyMetrics(
        measured,
        replayed,
        ideal,
        replayed / ideal if ideal else 1.0,
        measured / replayed if replayed else 1.0,
        float(np.median(np.abs(run.replayed - run.measured) / run.measured)),
        by_kind,
        by_replica,
        by_rank,
        {f"{replica}:{rank}": value for (replica, rank), value in by_worker.items()},
        by_link,
        won_back(is_worst),
        won_back(np.isin(run.rank, last)),
    )
