"""What slowed a run: what made its ops as long as they were, and what each cause costs.

    time of an op = its kind's mean x its stage x its replica x its worker x its microbatch x the rest

Each factor is 1 where nothing is special. A stage takes what it takes on a healthy worker: the lower median over
replicas, so that one slow worker does not pass for a slow stage. With one replica only, it takes what it took in its
faster steps. A microbatch is long by as much as it is on the middle one of all stages, so that neither a slow stage
nor a slow worker passes for one.

A cause takes from the ops concerned what is special about them, and the steps are run again: its cost is the time
that a step would be shorter without it. Costs do not add up: two stragglers may hide behind each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from penstock.analyze.replay import ReplayedRun
from penstock.analyze.step_table import free_at, ops_before
from penstock.engine.network import Array
from penstock.formats.traces.run_trace import Scope

FASTER_STEPS = 0.1
"""The quantile over steps that stands for a healthy worker where there is one replica."""


@dataclass(frozen=True, eq=False)
class Effects:
    """The factors of all compute ops, (K, C) for K steps and C ops, unless said otherwise.

    Attributes:
        ops: which ops of the table they are, (C,).
        stage: of the stage, against the mean over stages of its kind. replica, worker, microbatch: of these.
        rest: what none of them explains.
        by_stage: mean ms of each kind (row) and stage on a healthy worker; NaN where a stage has none.
        letters: the kinds, as `by_stage` has them.
        by_replica: (D,). by_worker: the mean over steps by replica and rank, (D, P).
        by_microbatch: the factor of each step, replica and microbatch, (K, D, N); NaN where there is none.
    """

    ops: Array
    stage: Array
    replica: Array
    worker: Array
    microbatch: Array
    rest: Array
    by_stage: Array
    letters: tuple[str, ...]
    by_replica: Array
    by_worker: Array
    by_microbatch: Array

    def without(self, own: Array, factor: Array, chosen: Array | None = None) -> Array:
        """What parts of steps take, (K, M + L), if compute ops lack a factor, (K, C); all, or some of them, (C,)."""
        by = factor if chosen is None else np.where(chosen, factor, 1.0)
        found = own.copy()
        found[:, self.ops] /= np.where(by > 0, by, 1.0)
        return found


def effects_of(run: ReplayedRun) -> Effects:
    """The factors that make up the times of a run's compute ops."""
    table = run.table
    ops = table.compute
    own = np.maximum(run.own[:, ops], 1e-9)
    letters, kind = np.unique(table.letters[ops], return_inverse=True)
    replica, stage, microbatch = table.replica[ops], table.stage[ops], table.microbatch[ops]
    sizes = len(letters), table.trace.num_replicas, table.trace.num_stages
    # Of the many microbatches of many steps the middle one is what a worker takes, whatever lengths it drew.
    usual = np.full(sizes, np.nan)
    for each, members in _groups((kind, replica, stage)):
        usual[each] = np.median(own[:, members])
    within = own / usual[kind, replica, stage]
    num_microbatches = int(microbatch.max()) + 1
    by_microbatch = np.full((len(own), sizes[1], num_microbatches), np.nan)
    for each, members in _groups((replica, microbatch)):
        by_microbatch[:, each[0], each[1]] = np.median(within[:, members], axis=1)
    by_microbatch /= np.nanmean(by_microbatch)
    microbatches = by_microbatch[:, replica, microbatch]
    alike = own / microbatches
    healthy = np.full(sizes[:1] + sizes[2:], np.nan)
    if sizes[1] > 1:
        healthy = _low_median(usual, axis=1)
    else:
        for each, members in _groups((kind, stage)):
            healthy[each] = np.quantile(np.median(alike[:, members], axis=1), FASTER_STEPS)
    by_replica = _low_median((usual / healthy[:, None, :]).transpose(1, 0, 2).reshape(sizes[1], -1), axis=1)
    by_replica = by_replica / _low_median(by_replica, axis=0)
    expected = healthy[kind, stage] * by_replica[replica]
    workers = np.ones((len(own), sizes[1], sizes[2]))
    for each, members in _groups((replica, stage)):
        workers[:, each[0], each[1]] = alike[:, members].sum(axis=1) / expected[members].sum()
    workers /= _low_median(workers.reshape(-1, sizes[2]), axis=0)
    worker = workers[:, replica, stage]
    rank = table.rank[ops]
    by_worker = np.ones((sizes[1], table.trace.num_ranks))
    for each, members in _groups((replica, rank)):  # by the time it works, so that a short op counts little
        by_worker[each] = own[:, members].sum() / (own[:, members] / worker[:, members]).sum()
    of_stage = healthy / np.nanmean(healthy, axis=1, keepdims=True)
    rest = own / (expected * worker * microbatches)
    return Effects(
        ops,
        np.broadcast_to(of_stage[kind, stage], own.shape),
        np.broadcast_to(by_replica[replica], own.shape),
        worker,
        microbatches,
        rest / rest.mean(),
        healthy,
        tuple(letters.tolist()),
        by_replica,
        by_worker,
        by_microbatch,
    )


def _groups(columns: tuple[Array, ...]) -> Iterator[tuple[tuple[int, ...], Array]]:
    """The places at which columns have the same values, with these."""
    stacked = np.stack(columns, axis=1)
    values, group = np.unique(stacked, axis=0, return_inverse=True)
    order = np.argsort(group.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(group.reshape(-1), minlength=len(values)))
    for value, members in zip(values.tolist(), np.split(order, ends[:-1])):
        yield tuple(value), members


def _low_median(values: Array, axis: int) -> Array:
    """The lower of the two middle values where their number is even; NaN values left out."""
    ordered = np.sort(values, axis=axis)
    count = np.sum(~np.isnan(values), axis=axis, keepdims=True)
    place = np.maximum((count - 1) // 2, 0)
    return np.take_along_axis(ordered, place, axis=axis).squeeze(axis)


LEAST = 0.002
"""The share of a step below which nothing is called a cause."""
MOST_WORKERS, MOST_REPLICAS, MOST_LINKS = 16, 3, 16
"""How many of the slowest are tried."""
SLOW_WORKER, SLOW_REPLICA, SLOW_LINK = 1.02, 1.02, 1.5
"""Factors from which workers, replicas and links are suspected."""


HELP = {
    "worker": "its ops take longer than the same ops elsewhere, or in other steps: look at its clocks, temperature, "
    "host and neighbours",
    "replica": "its ops take longer on all of its ranks: look at what its hosts share",
    "stage": "the model is cut unevenly: move layers away from this stage; the last one also has the loss",
    "microbatches": "balance sequence lengths: pack by work, deal microbatches out to replicas by work, put the "
    "longest in the middle of a step",
    "link": "look at its network card and switch; `penstock plan --link` plans round it (in torch: PlannedSchedule)",
    "messages": "what would be gained if messages took no time: more warm-up forwards hide it",
    "collective": "see the ranks and steps in which it is long",
    "local": "see the ranks and steps in which it is long",
    "launch": "what a rank does on its CPU between ops (loading data, launching kernels, garbage collection) holds "
    "it up; load ahead, use CUDA graphs, collect garbage on all ranks at the same step",
    "jitter": "look at what else runs on the hosts",
}
"""What would help against each kind of cause."""


@dataclass(frozen=True)
class SlowdownCause:
    """One cause.

    Attributes:
        kind: one of `HELP`.
        names: what it names: like {"replica": 0, "rank": 3}.
        what: the same in words.
        cost: ms of a step.
        share: of a step's time as measured.
        factor: how many times as long the ops concerned take, where that makes sense.

    Examples:
        >>> import penstock as ps
        >>> cause = ps.analyze.SlowdownCause("stage", {"stage": 3}, "stage 3 takes 1.4 times as long", cost=28.0)
        >>> cause.names, cause.cost
        ({'stage': 3}, 28.0)
    """

    kind: str
    names: Mapping[str, int | str]
    what: str
    cost: float
    share: float = 0.0
    factor: float | None = None

    @property
    def help(self) -> str:
        """What would help."""
        return HELP[self.kind]

    def to_json(self) -> dict[str, object]:
        found: dict[str, object] = {"kind": self.kind, "names": dict(self.names), "what": self.what}
        return found | {"cost_ms": self.cost, "share": self.share, "factor": self.factor, "help": self.help}


def causes_of(run: ReplayedRun, effects: Effects) -> tuple[SlowdownCause, ...]:
    """The causes of a run's slowness, the costliest first; those below `LEAST` of a step are left out."""
    measured = float(run.measured.mean())
    messages = list(_messages(run))
    lost = measured - float(run.replayed.mean()) - sum(by_late_starts for _, by_late_starts in messages)
    launch = SlowdownCause("launch", {}, "ops that were ready and started late", lost)
    links = [replace(each, cost=each.cost + by_late_starts) for each, by_late_starts in messages]
    found = [*_workers(run, effects), *_parts(run, effects), *links, *_others(run), launch]
    shared = [replace(each, share=each.cost / measured) for each in found]
    return tuple(sorted((each for each in shared if each.share >= LEAST), key=lambda each: -each.cost))


def _workers(run: ReplayedRun, effects: Effects) -> Iterator[SlowdownCause]:
    """Ranks that are slow alone, and replicas of which all are."""
    table = run.table
    replica, rank, stage = table.replica[effects.ops], table.rank[effects.ops], table.stage[effects.ops]
    for place in np.argsort(-effects.by_worker, axis=None)[:MOST_WORKERS].tolist():
        d, r = divmod(place, table.trace.num_ranks)
        factor = float(effects.by_worker[d, r])
        if factor < SLOW_WORKER:
            break
        here = (replica == d) & (rank == r)
        what = f"rank {r} of replica {d} ({_stages(stage[here])})"
        if table.trace.num_replicas == 1:
            what += ", longer in some steps than in its faster ones"
        cost = run.won(effects.without(run.own, np.maximum(effects.worker, 1.0), here))
        yield SlowdownCause("worker", {"replica": d, "rank": r}, what, cost, factor=factor)
    for d in np.argsort(-effects.by_replica)[:MOST_REPLICAS].tolist():
        factor = float(effects.by_replica[d])
        if factor > SLOW_REPLICA:
            cost = run.won(effects.without(run.own, effects.replica, replica == d))
            yield SlowdownCause("replica", {"replica": d}, f"all ranks of replica {d}", cost, factor=factor)


def _parts(run: ReplayedRun, effects: Effects) -> Iterator[SlowdownCause]:
    """A stage, microbatches and single ops that take longer than others."""
    table = run.table
    if table.trace.num_stages > 1:
        work = np.nansum(effects.by_stage, axis=0)
        worst = int(np.argmax(work))
        factor = float(work[worst] / work.mean())
        what = f"stage {worst}, {factor:.2f} times the mean stage"
        if table.trace.num_replicas == 1:
            ranks = np.unique(table.rank[effects.ops][table.stage[effects.ops] == worst]).tolist()
            what += f" (with one replica rank {', '.join(map(str, ranks))} may as well be slow)"
        cost = run.won(effects.without(run.own, effects.stage))
        yield SlowdownCause("stage", {"stage": worst}, what, cost, factor=factor)
    for kind, what, spread, factors in (
        ("microbatches", "microbatches that differ, by", np.nanstd(effects.by_microbatch), effects.microbatch),
        ("jitter", "single ops that take longer than others of their kind, by", effects.rest.std(), effects.rest),
    ):
        said = f"{what} {spread:.0%} (standard deviation)"
        cost = run.won(effects.without(run.own, np.maximum(factors, 1e-6)))
        yield SlowdownCause(kind, {}, said, cost, factor=1 + float(spread))


def _stages(stages: Array) -> str:
    found = np.unique(stages).tolist()
    return f"stage {found[0]}" if len(found) == 1 else f"stages {', '.join(map(str, found))}"


def _messages(run: ReplayedRun) -> Iterator[tuple[SlowdownCause, float]]:
    """Links whose messages take longer than those of others, and all messages; each with the ms of late starts that
    are its own.

    A link that is slow in several replicas is tried in all of them at once: with one alone mended, the others would
    still hold up the step.

    Where a trace has no ops for messages, a late link shows twice: messages are long, and ops start late. A receive
    may be posted only when the op before has ended, and a sender may be held up. So a slow link explains the late
    starts of ops whose message it carried, and of ops that follow a send over it: each by as much as its messages
    take longer than those of others. What an op starts later than that has another reason.
    """
    table, sent = run.table, run.messages
    if not len(sent.producer):
        return
    way = np.stack([table.replica[sent.consumer], table.rank[sent.producer], table.rank[sent.consumer]], axis=1)
    links, of_link = np.unique(way, axis=0, return_inverse=True)
    of_link = of_link.reshape(-1)
    own, forward = run.own[:, run.is_message], run.forward.astype(int)
    by_way = np.full((len(links), 2), np.nan)
    for (number, kind), members in _groups((of_link, forward)):
        by_way[number, kind] = own[:, members].mean()
    usual = _low_median(by_way, axis=0)
    means = np.array([own[:, of_link == number].mean() for number in range(len(links))])
    expected = np.array([usual[forward[of_link == number]].mean() for number in range(len(links))])
    slow: dict[tuple[int, int], list[int]] = {}
    for number in np.argsort(-means).tolist():
        if means[number] > 0 and means[number] >= SLOW_LINK * expected[number]:
            slow.setdefault((int(links[number, 1]), int(links[number, 2])), []).append(number)
    tried = list(slow.values())[:MOST_LINKS]
    explained, before = np.zeros((len(tried), table.num_ops)), ops_before(table)[0]
    for row, numbers in zip(explained, () if sent.recorded else tried):
        for number in numbers:
            row[np.isin(before, sent.producer[of_link == number])] += means[number] - expected[number]
            row[sent.consumer[of_link == number]] += means[number] - expected[number]
    ready, most = free_at(table), explained.sum(axis=0)
    arrived = table.end[:, sent.producer] + run.own[:, run.is_message]
    ready[:, sent.consumer] = np.maximum(ready[:, sent.consumer], arrived)
    late = np.where(table.is_scope(Scope.COMPUTE), np.maximum(table.start - ready, 0.0), 0.0)
    lost = max(0.0, float(run.measured.mean() - run.replayed.mean())) / max(float(late.sum()), 1e-9)
    by_late_starts = lost * (explained / np.maximum(most, 1e-9) @ np.minimum(late, most).sum(axis=0))
    by_slow_links = 0.0
    for numbers, late_ms in zip(tried, by_late_starts.tolist()):
        of_replicas = _slow_link(run, links[numbers], np.isin(of_link, numbers), usual[forward])
        if late_ms >= LEAST * run.measured.mean():
            of_replicas = replace(of_replicas, what=f"{of_replicas.what}, and late starts of the ops around them")
        by_slow_links += of_replicas.cost
        yield of_replicas, late_ms
        if len(numbers) > 1:  # it may be the slowest one alone that holds up the step
            yield _slow_link(run, links[numbers[:1]], of_link == numbers[0], usual[forward]), 0.0
    what = f"messages between ranks, {float(np.median(own)):.3g} ms in the median"
    yield SlowdownCause("messages", {}, what, _won_by(run, np.zeros_like(own)) - by_slow_links), 0.0


def _slow_link(run: ReplayedRun, links: Array, on: Array, usual: Array) -> SlowdownCause:
    """A link that is slow in some replicas, in all of these at once.

    Args:
        links: replica, source and target of each, (n, 3). on: which messages are theirs, (L,). usual: ms of each
            message, (L,), on other links.
    """
    own, num_replicas = run.own[:, run.is_message], run.table.trace.num_replicas
    d, a, b = map(int, links[0])
    names: dict[str, int | str] = {"source": a, "target": b}
    if len(links) == 1:
        names, where = {"replica": d, **names}, f"replica {d}"
    else:
        where = "all replicas" if len(links) == num_replicas else f"{len(links)} of {num_replicas} replicas"
    takes, other = float(own[:, on].mean()), float(usual[on].mean())
    what = f"link {a} to {b} of {where}, {takes:.3g} ms a message where others take {other:.3g}"
    cost = _won_by(run, np.where(on, np.minimum(own, usual), own))
    return SlowdownCause("link", names, what, cost, factor=takes / other if other else None)


def _won_by(run: ReplayedRun, messages: Array) -> float:
    """By how many ms a step is shorter if messages take so long."""
    return run.won(np.hstack([run.own[:, ~run.is_message], messages]))


def _others(run: ReplayedRun) -> Iterator[SlowdownCause]:
    """Collectives, and what ranks do besides the microbatches: each kind where it takes longer than usual."""
    for number, kind in enumerate(run.table.trace.kinds):
        of_kind = run.kind == number
        if kind.scope is Scope.COMPUTE or kind.scope.is_message or not of_kind.any():
            continue
        what = f"{kind.name}, beyond its usual {float(np.median(run.own[:, of_kind])):.3g} ms"
        cost = run.won(np.where(of_kind, run.ideal, run.own))
        yield SlowdownCause("collective" if kind.scope.is_collective else "local", {"op": kind.name}, what, cost)
