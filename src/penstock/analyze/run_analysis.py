"""The analysis of a recorded run: how much slower than it should be, why, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from penstock.analyze.causes import Effects, SlowdownCause, causes_of, effects_of
from penstock.analyze.fitted_pipelines import FittedPipelines, fitted
from penstock.analyze.replay import ReplayedRun, StudyMetrics, study_metrics
from penstock.analyze.step_table import aligned, whole_steps
from penstock.analyze.what_if import WhatIf, what_ifs
from penstock.formats.traces import RunTrace, Scope, TraceError


@dataclass(frozen=True, eq=False)
class RunAnalysis:
    """What an analysis found.

    Attributes:
        run: the steps and their networks, to ask more of.
        metrics: the study's, and by link.
        causes: the costliest first.
        what_ifs: the greatest gain first.
        effects: the factors of stages, workers and microbatches.
        fit: the pipelines as a schedule with costs; None where ranks did not run one order of F, B, I and W in all
            steps; a note says why.
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

    @property
    def counts(self) -> dict[str, int]:
        """How many steps, replicas and so on the trace has."""
        trace = self.run.table.trace
        return {
            "steps": len(self.run.table.steps),
            "replicas": trace.num_replicas,
            "ranks": trace.num_ranks,
            "stages": trace.num_stages,
            "microbatches": int(np.isfinite(self.effects.by_microbatch[0, 0]).sum()),
            "ops": len(self.run.table.steps) * self.run.table.num_ops,
        }

    def to_json(self) -> dict[str, Any]:
        """Everything but the ops, as plain values."""
        metrics = asdict(self.metrics)
        return {
            "trace": self.name,
            "step_ms": {name: metrics.pop(name) for name in ("measured", "replayed", "ideal")},
            **metrics,
            "bubble_ratio": self.bubble_ratio,
            "op_ms": self.op_times,
            "causes": [each.to_json() for each in self.causes],
            "what_ifs": [each.to_json() for each in self.what_ifs],
            "schedule": None if self.fit is None else self.fit.name,
            **{f"num_{noun}": count for noun, count in self.counts.items()},
            "steps": {
                int(step): {"measured": float(measured), "replayed": float(replayed)}
                for step, measured, replayed in zip(self.run.table.steps, self.run.measured, self.run.replayed)
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
    fit = None
    notes = list(table.trace.notes)
    if not run.messages.recorded and len(run.messages.producer):
        notes.append(
            "no ops show messages: a message takes from its op's end to the start of the op that waited for it"
        )
    try:
        fit = fitted(run, effects)
    except TraceError as error:
        notes.append(str(error))
    if not table.is_scope(Scope.REPLICAS, Scope.ALL).any() and trace.num_replicas > 1:
        notes.append("no collectives over replicas were recorded: a step ends with its slowest replica")
    return RunAnalysis(
        run,
        study_metrics(run),
        causes_of(run, effects),
        what_ifs(run, effects, fit, layers),
        effects,
        fit,
        tuple(notes),
    )
