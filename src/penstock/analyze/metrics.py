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
from penstock.formats.traces.run_trace import NONE

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
    by_link = {(a, b): added((source == a) & (run.rank == b)) for a, b in ways}
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
        by_worker,
        by_link,
        won_back(is_worst),
        won_back(np.isin(run.rank, last)),
    )
