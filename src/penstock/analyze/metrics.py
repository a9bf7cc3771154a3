"""The measures of the straggler study (Lin et al., OSDI 2025) over a replayed run, and the same by link.

S    = T / T_ideal                          how much slower the run is than if all ops of a kind took as long
S_t  = T_ideal with ops of type t / T_ideal  what one type of op does to an ideal run
S_w  = min(S_replica, S_rank)               what one worker does, as the study takes it
M_W  = (T - T_fixed) / (T - T_ideal)        what fixing the 3% of workers with the highest S_w would win back
M_S                                         what fixing the ranks of the last stage would win back

Where a step's time goes is the chain of ops and messages of which each began when the one before had ended. Ops that
are not on it can be made faster without any gain. An op that has a tenth of it wins a hundredth for each tenth by
which it is made faster, until another chain is the longest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from penstock.analyze.replay import ReplayedRun
from penstock.engine.network import Array
from penstock.formats.traces.run_trace import NONE, Scope

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


K = TypeVar("K")
MOST_STEPS = 16
"""Steps whose chains are followed: of more, as many from all over the run."""


@dataclass(frozen=True)
class CriticalShares:
    """Shares of a step's time, the largest first, the mean over steps.

    Attributes:
        by_kind: by the trace's name for the kind of op; messages are "messages".
        by_rank: of compute, over all replicas.
        by_link: of messages, by source and target, like "2>3".
    """

    by_kind: dict[str, float]
    by_rank: dict[int, float]
    by_link: dict[str, float]


def critical_shares(run: ReplayedRun) -> CriticalShares:
    """Follows the longest chain of each step, as it is replayed."""
    table, sent = run.table, run.messages
    by_kind: defaultdict[str, float] = defaultdict(float)
    by_rank: defaultdict[int, float] = defaultdict(float)
    by_link: defaultdict[str, float] = defaultdict(float)
    compute = table.is_scope(Scope.COMPUTE)
    picked = np.unique(np.linspace(0, len(table.steps) - 1, min(MOST_STEPS, len(table.steps))).astype(int))
    for net in run.networks:
        before = net.predecessors()
        for step in np.intersect1d(net.steps, picked).tolist():
            durations = net.durations(run.own[step])
            end = np.asarray(net.time(durations).start) + durations
            total = float(end.max()) * len(picked)
            queues = [int(np.argmax(end))]
            while before[queues[-1]]:
                queues.append(max(before[queues[-1]], key=lambda each: float(end[each])))
            for queue in queues:
                share, part = float(durations[queue]) / total, int(net.part[queue])
                if part >= table.num_ops:
                    by_kind["messages"] += share
                    message = part - table.num_ops
                    source, target = table.rank[sent.producer[message]], table.rank[sent.consumer[message]]
                    by_link[f"{source}>{target}"] += share
                elif part != NONE:
                    by_kind[run.kinds[table.kind[part]]] += share
                    if compute[part]:
                        by_rank[int(table.rank[part])] += share
    return CriticalShares(_sorted(by_kind), _sorted(by_rank), _sorted(by_link))


def _sorted(shares: dict[K, float]) -> dict[K, float]:
    return dict(sorted(((name, share) for name, share in shares.items() if share > 0), key=lambda each: -each[1]))
