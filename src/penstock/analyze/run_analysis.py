"""The analysis of a recorded run: how much slower than it should be, why, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.analyze.causes import SlowdownCause, causes_of
from penstock.analyze.clocks import aligned
from penstock.analyze.critical_path import CriticalShares, critical_shares
from penstock.analyze.effects import Effects, effects_of
from penstock.analyze.fitted_pipelines import FittedPipelines, fitted
from penstock.analyze.metrics import StudyMetrics, study_metrics
from penstock.analyze.replayed_run import ReplayedRun
from penstock.analyze.what_if import WhatIf, what_ifs
from penstock.analyze.whole import whole_steps
from penstock.formats.traces import RunTrace, Scope, TraceError


@dataclass(frozen=True, eq=False)
class RunAnalysis:
    """What an analysis found.

    Attributes:
        run: the steps and their networks, to ask more of.
        metrics: the study's, and by link.
        causes: the costliest first.
        what_ifs: the greatest gain first.
        critical: where a step's time goes.
        effects: the factors of stages, workers and microbatches.
        fit: the pipelines as a schedule with costs; None where ranks did not run one order in all steps.
        notes: what was assumed, left out or aligned.

    Examples:
        >>> import penstock as ps
        >>> import csv, pathlib, tempfile
        >>> from penstock.formats.traces import read_trace
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.csv"
        >>> t = ps.simulate(ps.build("1f1b", 2, 4), ps.Costs(f=[10, 14], i=[10, 14], w=[10, 14]))
        >>> rows = [(o.op.kind, o.op.stage, o.op.microbatch, o.rank, 0, o.start, o.end) for o in t.ops]
        >>> with path.open("w", newline="") as file:
        ...     csv.writer(file).writerows([("op", "stage", "microbatch", "rank", "step", "start", "end"), *rows])
        >>> found = ps.analyze.analyze_trace(read_trace([str(path)]))
        >>> found.causes[0].cost == max(cause.cost for cause in found.causes), len(found.what_ifs) > 0
        (True, True)
    """

    run: ReplayedRun = field(repr=False)
    metrics: StudyMetrics
    causes: tuple[SlowdownCause, ...]
    what_ifs: tuple[WhatIf, ...]
    critical: CriticalShares
    effects: Effects = field(repr=False)
    fit: FittedPipelines | None = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.run.table.trace.name

    @property
    def slowdown(self) -> float:
        """The study's S."""
        return self.metrics.slowdown

    @property
    def replay_error(self) -> float:
        """The median over steps of how far the replayed time is from the one measured, as a share of it."""
        return self.metrics.replay_error

    @property
    def bubble_ratio(self) -> float:
        """The share of their time in which ranks wait: they run no op."""
        table = self.run.table
        busy = self.run.own[:, np.flatnonzero(table.is_scope(Scope.COMPUTE, Scope.LOCAL))].sum()
        return float(1 - busy / (self.run.measured.sum() * table.num_workers))

    @property
    def op_times(self) -> dict[str, list[float | None]]:
        """Mean ms of each kind's ops by stage, waits left out; None where a stage has none."""
        table, computes = self.run.table, self.effects.ops
        own, letters, stage = self.run.own[:, computes], table.letters[computes], table.stage[computes]
        found: dict[str, list[float | None]] = {}
        for letter in self.effects.letters:
            each = [(letters == letter) & (stage == number) for number in range(table.trace.num_stages)]
            found[letter] = [float(own[:, ops].mean()) if ops.any() else None for ops in each]
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything but the ops, as plain values. Keys that are pairs become text."""
        table, m = self.run.table, self.metrics
        return {
            "trace": self.name,
            "slowdown": m.slowdown,
            "launch_slowdown": m.launch_slowdown,
            "replay_error": m.replay_error,
            "step_ms": {"measured": m.measured, "replayed": m.replayed, "ideal": m.ideal},
            "bubble_ratio": self.bubble_ratio,
            "op_ms": self.op_times,
            "causes": [each.to_json() for each in self.causes],
            "what_ifs": [each.to_json() for each in self.what_ifs],
            "by_kind": m.by_kind,
            "by_replica": {str(key): value for key, value in m.by_replica.items()},
            "by_rank": {str(key): value for key, value in m.by_rank.items()},
            "by_worker": {f"{replica}:{rank}": value for (replica, rank), value in m.by_worker.items()},
            "by_link": {f"{a}>{b}": value for (a, b), value in m.by_link.items()},
            "worst_workers": m.worst_workers,
            "last_stage": m.last_stage,
            "critical_path": {
                "by_kind": self.critical.by_kind,
                "by_rank": {str(key): value for key, value in self.critical.by_rank.items()},
                "by_link": {f"{a}>{b}": value for (a, b), value in self.critical.by_link.items()},
            },
            "schedule": None if self.fit is None else self.fit.name,
            "num_ops": len(table.steps) * table.num_ops,
            "num_steps": len(table.steps),
            "num_replicas": table.trace.num_replicas,
            "num_ranks": table.trace.num_ranks,
            "num_stages": table.trace.num_stages,
            "num_microbatches": int(np.isfinite(self.effects.by_microbatch[0, 0]).sum()),
            "steps": {
                str(int(step)): {"measured": float(measured), "replayed": float(replayed)}
                for step, measured, replayed in zip(table.steps, self.run.measured, self.run.replayed)
            },
            "notes": list(self.notes),
        }


def analyze_trace(trace: RunTrace, *, layers: Sequence[int] = (), drop_incomplete: bool = False) -> RunAnalysis:
    """Replays a recorded run by the engine and says what slowed it.

    Args:
        trace: as `penstock.formats.traces.read_trace` gives it.
        layers: of each stage, where known: then a better cut is one in whole layers.
        drop_incomplete: leave out steps in which ops are missing rather than refuse the trace.

    Raises:
        TraceError: the trace has no microbatches, ops are missing, a clock goes backwards, or it holds two jobs; the
            message says what is missing and what would help.

    Examples:
        >>> import penstock as ps
        >>> import csv, pathlib, tempfile
        >>> from penstock.formats.traces import read_trace
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.csv"
        >>> t = ps.simulate(ps.build("1f1b", 2, 4), ps.Costs(f=[10, 14], i=[10, 14], w=[10, 14]))
        >>> rows = [(o.op.kind, o.op.stage, o.op.microbatch, o.rank, 0, o.start, o.end) for o in t.ops]
        >>> with path.open("w", newline="") as file:
        ...     csv.writer(file).writerows([("op", "stage", "microbatch", "rank", "step", "start", "end"), *rows])
        >>> found = ps.analyze.analyze_trace(read_trace([str(path)]))
        >>> found.causes[0].kind, found.causes[0].names
        ('stage', {'stage': 1})
    """
    table = aligned(whole_steps(trace, drop_incomplete=drop_incomplete))
    if layers and (len(layers) != trace.num_stages or any(each < 0 for each in layers) or not any(layers)):
        raise TraceError(
            f"layers are {list(layers)}: give how many each of the {trace.num_stages} stages has, like 8,8,8,6"
        )
    run = ReplayedRun(table)
    effects = effects_of(run)
    fit = fitted(run, effects)
    notes = list(table.trace.notes)
    if not run.messages.recorded and len(run.messages.producer):
        notes.append(
            "no ops show messages: a message takes from its op's end to the start of the op that waited for it"
        )
    if fit is None:
        notes.append("orders differ between steps or replicas, so other schedules and orders were not tried")
    if not table.is_scope(Scope.REPLICAS, Scope.ALL).any() and trace.num_replicas > 1:
        notes.append("no collectives over replicas were recorded: a step ends with its slowest replica")
    return RunAnalysis(
        run,
        study_metrics(run),
        causes_of(run, effects),
        what_ifs(run, effects, fit, layers),
        critical_shares(run),
        effects,
        fit,
        tuple(notes),
    )
