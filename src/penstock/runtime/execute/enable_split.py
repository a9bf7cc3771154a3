"""Prepares stages for split backward if the schedule splits backwards, and reports what it could not prepare."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.runtime.execute.plan import ActivePlan
from penstock.runtime.stage.ops import StageRunner
from penstock.runtime.stage.split_backward import DeferredShare, prepare, unprepare
from penstock.runtime.stage.stage import Copy
from penstock.schedule.updates import OWNER

LITTLE = 0.5
"""A smaller share of a stage's work on weight gradients is worth a notice: W is planned to take all of it."""


def split_stages(runners: Mapping[Copy, StageRunner], running: ActivePlan) -> list[str]:
    """Readies stages for what runs from the next step on, and puts the others back; says which cannot be split."""
    notices = []
    for (pipeline, index), runner in runners.items():
        if not running.splits(index):
            unprepare(runner.stage)
            runner.may_split(None)
            continue
        report = prepare(runner.stage)
        reason = report.reason
        runner.may_split(report.shared if report.can_split else None, reason)
        if reason and pipeline == OWNER:
            notices.append(f"stage {index}: {reason}")
    return notices


def deferred_shares(runners: Mapping[Copy, StageRunner]) -> dict[int, DeferredShare]:
    """By stage, what the last step's split backward put off; of those here that are split."""
    found = {index: runner.deferred_share() for (_, index), runner in sorted(runners.items(), reverse=True)}
    return {index: share for index, share in found.items() if share is not None}


def little_deferred(runners: Mapping[Copy, StageRunner]) -> list[str]:
    """Says of stages, after a step, that the split backward put little off, and why."""
    return [
        f"stage {index}: {share.share:.0%} of the work on weight gradients waits for W, the rest is done in I: "
        + "; ".join(f"{_listed(names)}: {why}" for why, names in share.reasons.items())
        for (_, index), runner in sorted(runners.items())
        if (share := runner.new_share()) is not None and share.share < LITTLE
    ]


def stay_on_device(runners: Mapping[Copy, StageRunner]) -> list[str]:
    """Says of stages, after a step, what of their activations did not go to host memory, and why."""
    found = []
    for (_, index), runner in sorted(runners.items()):
        statistics = runner.offload_statistics
        whole = statistics.away + sum(statistics.stayed.values())
        if statistics.stayed and whole:
            rest = "; ".join(f"{why} {size / whole:.0%}" for why, size in sorted(statistics.stayed.items()))
            found.append(
                f"stage {index}: {statistics.away / whole:.0%} of what its forwards save goes to host memory where "
                f"the schedule says so, the rest stays: {rest}"
            )
    return found


def _listed(names: tuple[str, ...]) -> str:
    first = ", ".join(names[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
