"""Where a step's time goes: the chain of ops and messages of which each began when the one before had ended.

Whatever is not on it can be made faster without any gain; what has a tenth of it wins a hundredth for each tenth by
which it is made faster, until another chain is the longest.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from penstock.analyze.replayed_run import ReplayedRun
from penstock.formats.traces.run_trace import NONE, Scope

K = TypeVar("K")
MOST_STEPS = 16
"""Steps whose chains are followed: of more, as many from all over the run."""


@dataclass(frozen=True)
class CriticalShares:
    """Shares of a step's time, the largest first, the mean over steps.

    Attributes:
        by_kind: by the trace's name for the kind of op; messages are "messages".
        by_rank: of compute, over all replicas.
        by_link: of messages, by (source, target).
    """

    by_kind: dict[str, float]
    by_rank: dict[int, float]
    by_link: dict[tuple[int, int], float]


def critical_shares(run: ReplayedRun) -> CriticalShares:
    """Follows the longest chain of each step, as it is replayed."""
    table, sent = run.table, run.messages
    by_kind: defaultdict[str, float] = defaultdict(float)
    by_rank: defaultdict[int, float] = defaultdict(float)
    by_link: defaultdict[tuple[int, int], float] = defaultdict(float)
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
                    ends = (each[part - table.num_ops] for each in (sent.producer, sent.consumer))
                    source, target = (int(table.rank[op]) for op in ends)
                    by_link[source, target] += share
                elif part != NONE:
                    by_kind[run.kinds[table.kind[part]]] += share
                    if compute[part]:
                        by_rank[int(table.rank[part])] += share
    return CriticalShares(_sorted(by_kind), _sorted(by_rank), _sorted(by_link))


def _sorted(shares: dict[K, float]) -> dict[K, float]:
    return dict(sorted(((name, share) for name, share in shares.items() if share > 0), key=lambda each: -each[1]))
