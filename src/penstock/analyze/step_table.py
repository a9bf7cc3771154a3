"""The steps of a trace as one table: whole, on one clock, and with their messages.

A trace is whole if it is of one job, has every op of every step, and its clocks only go forwards. What follows can
then take for granted that all steps have the same ops, and lays them out as rows of one table.

Of each message the table shows which op made it, which needed it, and how long it took by itself. Where both ends
were recorded, a message takes from when the later end was there to when the receiver had it. Where none was, it takes
from its op's end to the start of the op that waited for it. What nobody waited for takes its link's median, or less
if it was needed sooner.

Clocks of hosts are brought together by messages within a pipeline, and by the ends of collectives between replicas. A
message can't arrive before it was sent. Between two ranks messages go both ways, activations and gradients. With both
clocks right, the shortest one each way takes its own time and no more:

    shortest there = way + (clock of b - clock of a)        so the clocks differ by half of what
    shortest back  = way - (clock of b - clock of a)        the two differ by

Clocks that break no message's order are left alone: there the way need not be the same in both directions.
If no shift of clocks mends the order, but every op ends after its message was sent, ranges hold the wait for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.formats.traces.run_trace import NONE, Array, RunTrace, Scope, TraceError

OVERLAP = 0.05
"""How far two ops of one rank may overlap, as a share of the shorter: what the rounding of timestamps makes."""
SHOWN = 3
CLOCK_HELP = (
    "record with a clock that is not set while it runs (CLOCK_MONOTONIC), or leave these steps out with --only-steps"
)
MOST = 1 << 20
"""Replicas, ranks, stages and microbatches of a step that a trace can have, each."""


@dataclass(frozen=True, eq=False)
class StepTable:
    """The same ops in every step: K steps, M ops.

    Attributes:
        trace: what it was made from; its own columns are in another order.
        steps: their numbers, (K,).
        kind, replica, rank, stage, microbatch: of each op of a step, (M,).
        number: which of several alike it is, (M,).
        start, end: ms from the step's first start, (K, M).
    """

    trace: RunTrace
    steps: Array
    kind: Array
    replica: Array
    rank: Array
    stage: Array
    microbatch: Array
    number: Array
    start: Array
    end: Array

    @property
    def num_ops(self) -> int:
        return len(self.kind)

    @property
    def num_workers(self) -> int:
        return self.trace.num_replicas * self.trace.num_ranks

    @cached_property
    def worker(self) -> Array:
        """The rank of each op, counted over all replicas, (M,)."""
        return self.replica * self.trace.num_ranks + self.rank

    @cached_property
    def letters(self) -> Array:
        """Penstock's letter of each op's kind; empty where it has none, (M,)."""
        return np.array([kind.kind for kind in self.trace.kinds])[self.kind]

    @cached_property
    def compute(self) -> Array:
        """Which ops are of a microbatch."""
        return np.flatnonzero(self.is_scope(Scope.COMPUTE))

    @cached_property
    def groups(self) -> Array:
        """The collective, or op of ranks that share its stage, that each op is a member of, (M,).

        NONE where it is none, or its only member.
        """
        found = np.full(self.num_ops, NONE)
        joined: dict[tuple[int, ...], list[int]] = {}
        for op in np.flatnonzero(self.is_scope(Scope.REPLICAS, Scope.PIPELINE, Scope.ALL, Scope.COMPUTE)).tolist():
            replica, rank, stage, microbatch = (
                int(column[op]) for column in (self.replica, self.rank, self.stage, self.microbatch)
            )
            where = {
                Scope.REPLICAS: (0, rank, stage),
                Scope.PIPELINE: (1, replica, 0),
                Scope.COMPUTE: (3, replica, stage, microbatch),
            }.get(self.trace.kinds[self.kind[op]].scope, (2, 0, 0))
            joined.setdefault((*where, int(self.kind[op]), int(self.number[op])), []).append(op)
        for group, members in enumerate(joined.values()):
            if len(members) > 1:
                found[members] = group
        return found

    def is_scope(self, *scopes: Scope) -> Array:
        """Whether each op is of one of these scopes, (M,)."""
        return np.array([kind.scope in scopes for kind in self.trace.kinds])[self.kind]

    def named(self, op: int) -> str:
        """An op, for people."""
        return _named(self, self.trace, op, int(self.number[op]))


def whole_steps(trace: RunTrace, *, drop_incomplete: bool = False) -> StepTable:
    """The steps of a trace as one table.

    Args:
        drop_incomplete: leave out steps in which ops are missing, and note it, rather than refuse the trace.

    Raises:
        TraceError: no microbatches, times that go backwards, ops that occur twice or are missing.
    """
    _require_microbatches(trace)
    _require_counted(trace)
    _require_times(trace)
    order = np.lexsort(
        (trace.start, trace.microbatch, trace.stage, trace.rank, trace.replica, trace.kind, trace.step)
    )
    trace = trace.take(order)
    number = _numbers(trace)
    _require_one_job(trace, number)
    _require_one_after_the_other(trace)
    columns = np.stack([trace.kind, trace.replica, trace.rank, trace.stage, trace.microbatch, number], axis=1)
    keys, of_key = np.unique(columns, axis=0, return_inverse=True)
    place = np.searchsorted(trace.steps, trace.step), of_key.reshape(-1)
    start, end = (np.full((len(trace.steps), len(keys)), np.nan) for _ in range(2))
    start[place], end[place] = trace.start, trace.end
    first = np.nanmin(start, axis=1, keepdims=True)
    kind, replica, rank, stage, microbatch, number = keys.T
    start, end = start - first, end - first
    table = StepTable(trace, trace.steps, kind, replica, rank, stage, microbatch, number, start, end)
    _require_all_stages(table)
    return _without_incomplete(table, drop_incomplete)


def _require_counted(trace: RunTrace) -> None:
    """Numbers that count places count from 0: a table has a row for each."""
    compute = trace.has(lambda kind: kind.scope is Scope.COMPUTE)
    for name in ("replica", "rank", "stage", "microbatch"):
        largest = int(getattr(trace, name)[compute].max())
        if largest >= MOST:
            raise TraceError(
                f"{trace.name} has an op of {name} {largest}: numbers of a {name} count from 0, anew in each step; "
                "number them so, or give another column by --column"
            )


def _require_microbatches(trace: RunTrace) -> None:
    names = sorted({kind.name for kind in trace.kinds})
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    help_ = (
        "a pipeline's forwards and backwards with their microbatches are needed: name them, like forward-compute, or "
        "say by --pattern what names mean, or wrap each in torch.profiler.record_function(f'PP:{stage}F{microbatch}')"
    )
    if not len(trace):
        raise TraceError(f"{trace.name} has no ops; {help_}")
    compute = trace.has(lambda kind: kind.scope is Scope.COMPUTE)
    if not compute.any():
        raise TraceError(f"{trace.name} has no forwards or backwards; its ops are {shown}; {help_}")
    without = compute & (trace.microbatch == NONE)
    if without.any():
        which = sorted({trace.kinds[kind].name for kind in np.unique(trace.kind[without]).tolist()})
        raise TraceError(
            f"{trace.name} does not say which microbatch {int(without.sum())} of {int(compute.sum())} ops are of "
            f"({', '.join(which)}); {help_}"
        )
    if (compute & (trace.stage == NONE)).any():
        raise TraceError(
            f"{trace.name} does not say of which stage its forwards and backwards are; give a pattern with a group "
            "named stage, or a column of that name"
        )
    letters = {trace.kinds[kind].kind for kind in np.unique(trace.kind[compute]).tolist()}
    if "F" not in letters or not letters & {"B", "I"}:
        lacks = "forwards" if "F" not in letters else "backwards"
        raise TraceError(f"{trace.name} has no {lacks}; its ops are {shown}; {help_}")


def _require_times(trace: RunTrace) -> None:
    """Raises TraceError where an op has no time, takes less than none, or all forwards and backwards take none."""
    known = np.isfinite(trace.start) & np.isfinite(trace.end)
    if not known.all():
        raise TraceError(f"{trace.name}: {int((~known).sum())} ops have no start or no end; leave their rows out")
    taken = trace.end - trace.start
    if (taken < 0).any():
        at = int(np.argmax(taken < 0))
        raise TraceError(
            f"{trace.name}: the clock goes backwards: {_spot(trace, at)} ends {-taken[at]:.6g} ms before it starts "
            f"({int((taken < 0).sum())} such ops); {CLOCK_HELP}"
        )
    if not taken[trace.has(lambda kind: kind.scope is Scope.COMPUTE)].any():
        raise TraceError(
            f"{trace.name}: no forward or backward takes any time; are the times of another unit, or rounded to it? "
            "Give --unit, or record with a finer clock"
        )


def _require_one_after_the_other(trace: RunTrace) -> None:
    """Raises TraceError where an op of a microbatch starts before the one before it on its rank has ended."""
    compute = np.flatnonzero(trace.has(lambda kind: kind.scope is Scope.COMPUTE))
    names = ("end", "start", "rank", "replica", "step")
    order = compute[np.lexsort([getattr(trace, name)[compute] for name in names])]
    before, after = order[:-1], order[1:]
    worker = np.stack([trace.step, trace.replica, trace.rank])
    same = (worker[:, before] == worker[:, after]).all(axis=0)
    shorter = np.minimum(trace.end[before] - trace.start[before], trace.end[after] - trace.start[after])
    over = trace.end[before] - trace.start[after]
    wrong = np.flatnonzero(same & (over > OVERLAP * shorter) & (over > 1e-3))
    if len(wrong):
        a, b = int(before[wrong[0]]), int(after[wrong[0]])
        raise TraceError(
            f"{trace.name}: the clock goes backwards, or ops overlap: {_spot(trace, b)} starts "
            f"{over[wrong[0]]:.6g} ms before {_named(trace, trace, a)} has ended on the same rank "
            f"({len(wrong)} such pairs); {CLOCK_HELP}"
        )


def _numbers(trace: RunTrace) -> Array:
    """Which of its kind each op is in its step, of a trace in the order of `whole_steps`."""
    names = ("step", "kind", "replica", "rank", "stage", "microbatch")
    columns = np.stack([getattr(trace, name) for name in names])
    new = np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0))
    place = np.arange(len(trace))
    return place - np.maximum.accumulate(np.where(new, place, 0))


def _require_one_job(trace: RunTrace, number: Array) -> None:
    twice = trace.has(lambda kind: kind.scope is Scope.COMPUTE) & (number > 0)
    if twice.any():
        at = int(np.flatnonzero(twice)[0])
        raise TraceError(
            f"{trace.name}: {_spot(trace, at)} occurs twice, {trace.start[at] - trace.start[at - 1]:.6g} ms apart "
            f"({int(twice.sum())} such ops): are there two jobs, or two attempts of one, in this file? Give the rows "
            "of one, or tell them apart by replica"
        )


def _require_all_stages(table: StepTable) -> None:
    """Raises TraceError where a microbatch misses a stage in all steps."""
    name, compute = table.trace.name, table.compute
    every = np.unique(table.stage[compute]).tolist()
    if every != list(range(len(every))):
        absent = next(stage for stage in range(len(every) + 1) if stage not in every)
        raise TraceError(
            f"{name} has no ops of stage {absent}, but of stage {every[-1]}: is the file of one rank missing? "
            "Give the traces of all ranks, or the folder that holds them"
        )
    for replica in np.unique(table.replica[compute]).tolist():
        here = compute[table.replica[compute] == replica]
        for stage in every:
            for noun, letters in (("forward", ("F",)), ("backward", ("B", "I"))):
                ran = here[(table.stage[here] == stage) & np.isin(table.letters[here], letters)]
                if len(lacks := np.setdiff1d(table.microbatch[here], table.microbatch[ran])):
                    raise TraceError(
                        f"{name}: replica {replica} has no {noun} of stage {stage} for microbatch "
                        f"{', '.join(map(str, lacks[:SHOWN]))}{' and others' if len(lacks) > SHOWN else ''} in any "
                        "step: was recording started or stopped in the middle of a step? Record whole steps, or give "
                        "those that are with --only-steps"
                    )


def _without_incomplete(table: StepTable, drop_incomplete: bool) -> StepTable:
    """Refuses steps in which ops are missing, or leaves them out and notes it."""
    trace, there = table.trace, ~np.isnan(table.start)
    complete = there.all(axis=1)
    if complete.all():
        return table
    lacking = np.flatnonzero(~complete).tolist()
    numbers = ", ".join(str(int(table.steps[at])) for at in lacking[:8]) + (" ..." if len(lacking) > 8 else "")
    missing = [table.named(op) for op in np.flatnonzero(~there[lacking[0]]).tolist()]
    said = (
        f"step {int(table.steps[lacking[0]])} has {table.num_ops - len(missing)} of {table.num_ops} ops; missing are "
        f"{'; '.join(missing[:SHOWN])}{f' and {len(missing) - SHOWN} more' if len(missing) > SHOWN else ''}"
    )
    if not complete.any():
        raise TraceError(
            f"{trace.name}: no step has all ops that others have: {said}. Record whole steps; where steps differ in "
            "their microbatches, choose those with the same ops by --only-steps"
        )
    if not drop_incomplete:
        raise TraceError(
            f"{trace.name}: ops are missing in {len(lacking)} of {len(there)} steps ({numbers}): {said}. Record them "
            "again, or leave these steps out with --drop-incomplete"
        )
    noted = trace.with_note(f"{len(lacking)} steps in which ops are missing were left out: {numbers}")
    times = {name: getattr(table, name)[complete] for name in ("steps", "start", "end")}
    return replace(table, trace=noted, **times)


def _named(of: RunTrace | StepTable, trace: RunTrace, at: int, number: int = 0) -> str:
    kind = trace.kinds[of.kind[at]]
    where = f"replica {of.replica[at]}, rank {of.rank[at]}"
    if NONE not in (of.microbatch[at], of.stage[at]):
        return f"{kind.name} of microbatch {of.microbatch[at]}, stage {of.stage[at]} ({where})"
    return f"{kind.name}{f' number {number}' if number else ''} ({where})"


def _spot(trace: RunTrace, at: int) -> str:
    return f"step {int(trace.step[at])}, {_named(trace, trace, at)}"


BACKWARDS = ("B", "I")


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages between ranks of a step: L of them.

    Attributes:
        producer, consumer: ops of the step that made and needed each, (L,).
        receive: ops that recorded its end; NONE where none did.
        own: ms that each took by itself, (K, L).
        posted: the op after which the message's receive was posted; NONE where the receive was posted before all ops,
            or its moment is not known.
    """

    producer: Array
    consumer: Array
    receive: Array
    own: Array
    posted: Array

    @property
    def recorded(self) -> bool:
        return bool((self.receive != NONE).any())


def messages_of(table: StepTable) -> Messages:
    """The messages of all steps of a table.

    Raises:
        TraceError: there are more or fewer ends of messages than ops that need them.
    """
    made: dict[tuple[str, int, int, int], list[int]] = {}  # by all ranks that share the stage
    for op in table.compute.tolist():
        letter = "B" if table.letters[op] in BACKWARDS else str(table.letters[op])
        key = letter, int(table.replica[op]), int(table.stage[op]), int(table.microbatch[op])
        made.setdefault(key, []).append(op)
    pairs = []
    for (letter, replica, stage, microbatch), ops in made.items():
        sources = made.get((letter, replica, stage + (-1 if letter == "F" else 1), microbatch), [])
        have = table.rank[sources]
        for op in ops if letter in ("F", "B") and sources else ():
            if table.rank[op] not in have:
                pairs.append((sources[0], op))
    producer, consumer = np.array(pairs, np.int64).reshape(-1, 2).T
    receive = _ends(table, consumer, Scope.RECEIVE)
    if (receive == NONE).all():
        own = _by_waiting(table, producer, consumer)
        return Messages(producer, consumer, receive, own, np.full(len(consumer), NONE))
    send = _ends(table, producer, Scope.SEND)
    began = np.where(send == NONE, table.end[:, producer], table.start[:, send])
    posted = np.where(receive == NONE, began, table.start[:, receive])
    arrived = np.where(receive == NONE, table.start[:, consumer], table.end[:, receive])
    own = np.maximum(arrived - np.maximum(began, posted), 0.0)
    return Messages(producer, consumer, receive, own, _posted(table, consumer, receive))


def _ends(table: StepTable, ops: Array, scope: Scope) -> Array:
    """The recorded op that sent, or received, the message of each op; NONE where none was recorded."""
    found = np.full(table.num_ops, NONE)
    has_message = np.zeros(table.num_ops, bool)
    has_message[ops] = True
    order = np.argsort(table.start[0], kind="stable")
    is_end, is_compute = table.is_scope(scope)[order], table.is_scope(Scope.COMPUTE)[order]
    for letters in (("F",), BACKWARDS):
        is_letter = np.isin(table.letters[order], letters)
        for worker in range(table.num_workers):
            here = (table.worker[order] == worker) & is_letter
            recorded, computed = order[here & is_end], order[here & is_compute]
            if not len(recorded):
                continue
            needing = computed[has_message[computed]]
            names = list(zip(table.stage[recorded].tolist(), table.microbatch[recorded].tolist()))
            by_name = dict(zip(names, recorded.tolist()))
            named = [by_name.get((int(table.stage[op]), int(table.microbatch[op])), NONE) for op in needing]
            is_known = all(NONE not in name for name in names) and len(by_name) == len(names)
            if NONE not in named or (is_known and max(named) != NONE):
                found[needing] = named
            elif len(recorded) == len(computed):  # also what goes nowhere was recorded
                found[computed] = recorded
            elif len(recorded) == len(needing):
                found[needing] = recorded
            elif len(recorded) == len(computed) - 1:  # all but the very first receive, or the very last send
                found[computed[1:] if scope is Scope.RECEIVE else computed[:-1]] = recorded
            else:
                replica, rank = divmod(worker, table.trace.num_ranks)
                raise TraceError(
                    f"{table.trace.name}: replica {replica}, rank {rank} has {len(recorded)} of "
                    f"{table.trace.kinds[int(table.kind[recorded[0]])].name}, and {len(needing)} ops that need "
                    "one; are ops missing? Record whole steps, or leave sends and receives out altogether"
                )
    return found[ops]


def _posted(table: StepTable, consumer: Array, receive: Array) -> Array:
    """The op after which each message's receive was posted: the last op of its consumer's kind that had ended.
    NONE where no such op had ended.

    Most receivers post a receive when they have run the op before. Some post several ahead.
    """
    start, end = table.start[0], table.end[0]
    at = {op: start[by] + LEAST if by != NONE else -np.inf for op, by in zip(consumer.tolist(), receive.tolist())}
    ran: dict[tuple[int, bool], list[int]] = {}
    posted = np.full(table.num_ops, NONE)
    for op in table.compute[np.argsort(start[table.compute], kind="stable")].tolist():
        if table.letters[op] in ("F", *BACKWARDS):
            before = ran.setdefault((int(table.worker[op]), bool(table.letters[op] == "F")), [])
            posted[op] = next((each for each in reversed(before) if end[each] <= at.get(op, -np.inf)), NONE)
            before.append(op)
    return posted[consumer]


def ops_before(table: StepTable) -> Array:
    """The compute op before each compute op on its rank, (K, M); NONE for others, and for the first."""
    before = np.full(table.start.shape, NONE)
    for found, start in zip(before, table.start):
        order = table.compute[np.lexsort((start[table.compute], table.worker[table.compute]))]
        same = table.worker[order][1:] == table.worker[order][:-1]
        found[order[1:][same]] = order[:-1][same]
    return before


def free_at(table: StepTable) -> Array:
    """When the rank of each compute op had ended the one before, (K, M); 0 for others, and for the first."""
    before = ops_before(table)
    free = np.where(before == NONE, 0.0, np.take_along_axis(table.end, before, axis=1))
    shared = np.unique(table.groups[table.compute])
    for group in shared[shared != NONE].tolist():
        members = table.groups == group  # an op waits for all members
        free[:, members] = free[:, members].max(axis=1, keepdims=True)
    return free


def _by_waiting(table: StepTable, producer: Array, consumer: Array) -> Array:
    """Ms from each op's end to the start of the op that waited for its message, (K, L)."""
    gap = table.start[:, consumer] - table.end[:, producer]
    own = np.where(table.end[:, producer] >= free_at(table)[:, consumer], gap, np.nan)
    links = np.stack([table.rank[producer], table.rank[consumer]], axis=1)
    for link in np.unique(links, axis=0):
        on = np.flatnonzero((links == link).all(axis=1))
        known = own[:, on][~np.isnan(own[:, on])]
        usual = float(np.median(known)) if len(known) else 0.0
        own[:, on] = np.where(np.isnan(own[:, on]), np.minimum(usual, gap[:, on]), own[:, on])
    return np.maximum(own, 0.0)


WRONG = 0.1
"""The share of an op's time by which a message may still arrive too early once clocks are together."""
LEAST = 0.1
"""Ms by which a message must arrive before it was sent for clocks to be aligned: less is rounding."""


def aligned(table: StepTable) -> StepTable:
    """The steps on one clock; as they are where no message arrives before it was sent, and no collective's ends lie
    apart by more than it lasts.
    """
    sent = messages_of(table)
    ways, tolerance = _ways(table, sent), _tolerance(table, sent)
    links = np.stack([table.worker[sent.producer], table.worker[sent.consumer]], axis=1)
    shortest = {
        (a, b): ways[:, (links == (a, b)).all(axis=1)].min(axis=1) for a, b in np.unique(links, axis=0).tolist()
    }
    offset = np.zeros((len(table.steps), table.num_workers))
    wrong = [pair for pair, ways in shortest.items() if ways.min() < -LEAST]
    if wrong:
        _over_messages(offset, shortest)
    if not _over_collectives(offset, table) and not wrong:
        return table
    start, end = table.start - offset[:, table.worker], table.end - offset[:, table.worker]
    first = start.min(axis=1, keepdims=True)
    together = replace(table, start=start - first, end=end - first)
    ways = _ways(together, sent)
    if ways.min(initial=0.0) < -tolerance:
        if (waiting := _without_waits(table, sent)) is not None:
            return waiting
        step, message = np.unravel_index(int(np.argmin(ways)), ways.shape)
        raise TraceError(
            f"{table.trace.name}, step {int(table.steps[step])}: {table.named(int(sent.consumer[message]))} starts "
            f"{-ways[step, message]:.6g} ms before {table.named(int(sent.producer[message]))} has ended, which it "
            "needs, and no shift of clocks mends that: are stages numbered otherwise than they follow each other, do "
            "they branch, or is a rank's file of another run? Where names have no stage, --ranks says how many a "
            "pipeline has"
        )
    largest = np.abs(offset - offset.mean(axis=1, keepdims=True)).max()
    note = f"clocks of ranks were brought together, by up to {largest:.3g} ms"
    if wrong:
        a, b = (worker % table.trace.num_ranks for worker in wrong[0])
        note += f": a message from rank {a} to {b} arrived before it was sent"
    return replace(together, trace=table.trace.with_note(note))


def _ways(table: StepTable, sent: Messages) -> Array:
    """Ms from when each message was computed to when it was there, at the latest, (K, L)."""
    arrived = table.start[:, sent.consumer].copy()
    has = sent.receive != NONE
    arrived[:, has] = table.end[:, sent.receive[has]]
    return arrived - table.end[:, sent.producer]


def _tolerance(table: StepTable, sent: Messages) -> float:
    """Ms by which a message may still arrive too early."""
    taken = (table.end - table.start)[:, sent.producer]
    return max(LEAST, WRONG * float(np.median(taken))) if taken.size else LEAST


def _without_waits(table: StepTable, sent: Messages) -> StepTable | None:
    """The steps with ops that begin when their message was sent; None where one would have no time left."""
    if (sent.receive != NONE).any():
        return None
    start = table.start.copy()
    for producer, consumer in zip(sent.producer, sent.consumer):
        start[:, consumer] = np.maximum(start[:, consumer], table.end[:, producer])
    own = table.end - start
    for kind, stage in set(zip(table.kind[sent.consumer].tolist(), table.stage[sent.consumer].tolist())):
        alike = own[:, (table.kind == kind) & (table.stage == stage)]
        if alike.min() <= WRONG * np.median(alike) - 2 * LEAST:
            return None
    start = np.minimum(start, table.end)
    waits = int((start > table.start + LEAST).sum())
    note = f"{waits} ops begin before their message was sent: their ranges hold the wait for it, which is left out"
    return replace(table, start=start, trace=table.trace.with_note(note))


def _over_messages(offset: Array, shortest: dict[tuple[int, int], Array]) -> None:
    """How far each worker's clock is ahead of the first one's of its pipeline."""
    joined: dict[int, set[int]] = {}
    for a, b in shortest:
        joined.setdefault(a, set()).add(b)
        joined.setdefault(b, set()).add(a)
    seen: set[int] = set()
    for first in sorted(joined):
        todo = deque({first} - seen)
        seen.add(first)
        while todo:
            a = todo.popleft()
            for b in sorted(joined[a] - seen):
                there, back = shortest.get((a, b)), shortest.get((b, a))
                if there is not None and back is not None:
                    ahead = (there - back) / 2
                elif there is not None:  # one way only: no more than what breaks the order
                    ahead = np.minimum(there, 0.0)
                else:
                    ahead = -np.minimum(shortest[b, a], 0.0)
                offset[:, b] = offset[:, a] + ahead
                seen.add(b)
                todo.append(b)


def _over_collectives(offset: Array, table: StepTable) -> bool:
    """Moves pipelines whose collectives end at other times than those of replica 0; whether any had to move."""
    num_ranks = table.trace.num_ranks
    moved = False
    ops = np.flatnonzero(table.is_scope(Scope.REPLICAS))
    names = list(zip(table.kind[ops].tolist(), table.rank[ops].tolist(), table.number[ops].tolist()))
    of_first = {name: op for name, op in zip(names, ops.tolist()) if table.replica[op] == 0}
    end = table.end - offset[:, table.worker]
    for replica in range(1, table.trace.num_replicas):
        pairs = [
            (op, of_first[name])
            for name, op in zip(names, ops.tolist())
            if table.replica[op] == replica and name in of_first
        ]
        if not pairs:
            continue
        mine, first = np.array(pairs).T
        taken = table.end - table.start
        gap = np.median(end[:, mine] - end[:, first], axis=1)
        last = np.median(np.minimum(taken[:, mine], taken[:, first]), axis=1)
        if (np.abs(gap) > last + LEAST).any():
            offset[:, replica * num_ranks : (replica + 1) * num_ranks] += gap[:, None]
            moved = True
    return moved
