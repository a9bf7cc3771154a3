"""The comparison: checks all contenders, simulates them, and then trains one after another."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cost import Costs
from penstock.formats.files import write_whole
from penstock.schedule import Schedule
from penstock.simulation.simulator import untimed_kinds
from penstock.train.checks import SettingsError
from penstock.train.compare.contenders import shown_name
from penstock.train.compare.page import write_page
from penstock.train.compare.result import Comparison, ComparisonRow
from penstock.train.compare.simulated import AS_PLANNED, Costing, SimulatedRun, simulated
from penstock.train.compare.trained import trained
from penstock.train.inputs import Inputs, gather_inputs
from penstock.train.settings import Settings
from penstock.train.tasks.open import schedule_of

Say = Callable[[str], None]


@dataclass(frozen=True)
class CostSource:
    """Costs, where they come from in words, and the tokens of a sample for a model on text."""

    words: str
    num_tokens: int | None
    costing: Costing


def compare(
    contenders: Sequence[Settings],
    trains: bool,
    source: Callable[[], CostSource],
    out: Path | None,
    say: Say,
    run: SimulatedRun = AS_PLANNED,
    memory_limit: float | None = None,
) -> tuple[Comparison, dict[str, str]]:
    """Compares, and returns the comparison and the files that were written.

    Args:
        contenders: settings that differ only in the schedule.
        trains: whether to train, or only to simulate.
        source: makes the costs, once everything is checked.
        out: a folder that is made for the runs and the page; None to keep nothing.
        run: how they are simulated.
        memory_limit: bytes that a rank may hold. The result says who fits.

    Raises:
        SettingsError, ScheduleError, PartitionError, DataError, CostError: before anything starts.
        RunFailed: a rank failed.
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingsError(f"--out {out} is there already; give a folder that is not, or is empty")
    schedules = [schedule_of(settings) for settings in contenders]
    inputs = _gather(contenders) if trains else []
    run.links.check_ranks(contenders[0].ranks)
    costs = source()
    rows, untimed = [], []
    for settings, plan in zip(contenders, schedules, strict=True):
        of_stages = costs.costing(plan)
        rows.append(_simulated(settings, plan, of_stages, run))
        if kinds := untimed_kinds(plan, of_stages):
            untimed.append(f"{' and '.join(kinds)} of {rows[-1].name}")
    if memory_limit is not None and any(row.simulated.memory is None for row in rows):
        raise SettingsError(
            f"{costs.words} do not say what weights take, so that nobody knows what fits into --memory-limit; give "
            "a preset, a profile, or a model"
        )
    if trains:
        rows = _train(rows, inputs, out, say)
    first = contenders[0]
    tokens = None if costs.num_tokens is None else costs.num_tokens * first.batch / first.microbatches
    found = Comparison(
        rows,
        costs.words,
        first.steps if trains else 0,
        first.batch,
        first.microbatches,
        first.ranks,
        tokens,
        [*_notices(contenders, trains), *_said_of_times(untimed)],
        run,
        memory_limit,
    )
    return found, {} if out is None else _write(found, out)


def _gather(contenders: Sequence[Settings]) -> list[Inputs]:
    """The inputs of each run. The text is read once."""
    found: list[Inputs] = []
    for settings in contenders:
        found.append(gather_inputs(settings, found[0].data.corpus if found else None))
    return found


def _simulated(settings: Settings, schedule: Schedule, costs: Costs, run: SimulatedRun) -> ComparisonRow:
    found = simulated(settings, schedule, costs, run)
    return ComparisonRow(shown_name(settings.schedule), settings.passes.steps, found)


def _said_of_times(untimed: Sequence[str]) -> list[str]:
    """Names ops that look faster than they are, because the costs do not name them."""
    if not untimed:
        return []
    return [f"simulated in 0 ms, as the costs do not name them: {', '.join(untimed)}"]


def _train(
    rows: Sequence[ComparisonRow], inputs: Sequence[Inputs], out: Path | None, say: Say
) -> list[ComparisonRow]:
    done: list[ComparisonRow] = []
    with _folder(out) as folder:
        for row, each in zip(rows, inputs, strict=True):
            if done and done[-1].trained is not None and done[-1].trained.interrupted:
                break
            say(f"training {each.settings.steps} steps of {row.name}")
            learned = trained(each, folder / row.name)
            say(f"  loss {learned.loss:.3f} on the validation data")
            done.append(ComparisonRow(row.name, row.drain_every, row.simulated, learned))
    return done


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """The folder of the runs: in `out`, or a temporary one."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="penstock-compare-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _notices(contenders: Sequence[Settings], trains: bool) -> list[str]:
    """How they differ besides the schedule."""
    told = []
    windows = {shown_name(each.schedule): each.passes.window for each in contenders if each.is_asynchronous}
    if any(window != contenders[0].microbatches for window in windows.values()):
        each = ", ".join(f"{window} in {name}" for name, window in windows.items())
        told.append(f"microbatches that an update gathers: {each}")
    if not trains:
        return told
    optimizers = {(each.optimizer, json.dumps(dict(each.optimizer_options)), each.lr) for each in contenders}
    if len(optimizers) > 1:
        each = ", ".join(f"{shown_name(one.schedule)} {one.optimizer} at {one.lr:g}" for one in contenders)
        told.append(f"their optimizers differ: {each}")
    if contenders[0].clip and windows:
        told.append("asynchronous schedules clip each stage's gradient by itself, the others the whole model's")
    return told


def _write(found: Comparison, out: Path) -> dict[str, str]:
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "compare.json", json.dumps(found.to_json(), indent=2, allow_nan=False) + "\n")
    return {"json": str(out / "compare.json"), **write_page(found, out)}
