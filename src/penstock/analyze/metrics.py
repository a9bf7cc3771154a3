"""The measures of the straggler study (Lin et al., OSDI 2025) over a replayed run, and the same by link.

S    = T / T_ideal                          how much slower the run is than if all ops of a kind took as long
S_t  = T_ideal with ops of type t / T_ideal  what one type of op does to an ideal run
S_w  = min(S_replica, S_rank)               what one worker does, as the study takes it
M_W  = (T - T_fixed) / (T - T_ideal)        what fixing the 3% of workers with the highest S_w would win back
M_S                                         what fixing the ranks of the last stage would win back
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.analyze.replayed_run import ReplayedRun
from penstock.engine.network import Array
from penstock.formats.traces.run_trace import Scope

MOST_WORKERS = 0.03
"""The share of workers that M_W fixes."""
FORWARD_MESSAGES, BACKWARD_MESSAGES = "forward-pp-comm", "backward-pp-comm"


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
        by_worker: S_w by (replica, rank).
        by_link: what each directed pair of ranks does to an ideal run, over all replicas.
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
    by_worker: dict[tuple[int, int], float]
    by_link: dict[tuple[int, int], float]
    worst_workers: float
    last_stage: float


def study_metrics(run: ReplayedRun) -> StudyMetrics:
    """All of them, each by running the steps again."""
    table, sent = run.table, run.messages
    measured, replayed = float(run.measured.mean()), float(run.replayed.mean())
    ideal = run.ideal_time

    def added(ops: Array, messages: Array) -> float:
        """The slowdown of an ideal run in which these ops are as they were."""
        if np.array_equal(run.own.ops[:, ops], run.ideal.ops[:, ops]) and not messages.any():
            return 1.0
        return run.mean(run.ideal.with_others(run.own, ops, messages)) / ideal

    none = np.zeros(table.num_ops, bool), np.zeros(len(sent.producer), bool)
    by_kind = {
        kind.name: added(table.kind == number, none[1])
        for number, kind in enumerate(table.trace.kinds)
        if not kind.scope.is_message and (table.kind == number).any()
    }
    for name, forward in ((FORWARD_MESSAGES, True), (BACKWARD_MESSAGES, False)):
        if (run.forward == forward).any():
            by_kind[name] = added(none[0], run.forward == forward)
    replica_of, rank_of = table.replica[sent.consumer], table.rank[sent.consumer]
    by_replica = {
        replica: added(table.replica == replica, replica_of == replica) for replica in range(table.trace.num_replicas)
    }
    by_rank = {rank: added(table.rank == rank, rank_of == rank) for rank in range(table.trace.num_ranks)}
    by_worker = {
        (replica, rank): min(by_replica[replica], by_rank[rank]) for replica in by_replica for rank in by_rank
    }
    ways = sorted(set(zip(table.rank[sent.producer].tolist(), rank_of.tolist())))
    by_link = {
        (a, b): added(none[0], (table.rank[sent.producer] == a) & (rank_of == b)) for a, b in ways
    }  # fmt: skip

    def won_back(ops: Array, messages: Array) -> float:
        if replayed <= ideal:
            return 0.0
        return (replayed - run.mean(run.own.with_others(run.ideal, ops, messages))) / (replayed - ideal)

    most = math.ceil(MOST_WORKERS * len(by_worker))
    worst = sorted(by_worker, key=lambda worker: (-by_worker[worker], worker[1], worker[0]))[:most]
    fixed = _of_workers(worst, table.replica, table.rank), _of_workers(worst, replica_of, rank_of)
    last = _last_ranks(run)
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
        by_worker,
        by_link,
        won_back(*fixed),
        won_back(np.isin(table.rank, last), np.isin(rank_of, last)),
    )


def _of_workers(workers: list[tuple[int, int]], replica: Array, rank: Array) -> Array:
    found = np.zeros(len(replica), bool)
    for each in workers:
        found |= (replica == each[0]) & (rank == each[1])
    return found


def _last_ranks(run: ReplayedRun) -> list[int]:
    """The ranks that run the last stage."""
    table = run.table
    last = table.is_scope(Scope.COMPUTE) & (table.stage == table.trace.num_stages - 1)
    return np.unique(table.rank[last]).tolist()
