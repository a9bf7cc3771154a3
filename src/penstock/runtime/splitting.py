"""Which stages are ready for split backward: those whose schedule asks for it, and no others."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.runtime.copies import Copy
from penstock.runtime.fsdp import is_fully_sharded
from penstock.runtime.running import Running
from penstock.runtime.split import prepare, unprepare
from penstock.runtime.stage_runner import StageRunner
from penstock.schedule.updates import OWNER


def split_stages(runners: Mapping[Copy, StageRunner], running: Running) -> list[str]:
    """Readies stages for what runs from the next step on, and puts the others back; says which cannot be split."""
    notices = []
    for (pipeline, index), runner in runners.items():
        if not running.splits(index):
            unprepare(runner.stage)
            runner.may_split(None)
            continue
        if is_fully_sharded(runner.stage):
            runner.may_split(None)
            notices.append(f"stage {index}: FSDP2 takes gradients from whole backwards alone")
            continue
        report = prepare(runner.stage)
        runner.may_split(report.shared if report.can_split else None)
        if not report.can_split and pipeline == OWNER:
            notices.append(f"stage {index}: {report.reason}")
    return notices
