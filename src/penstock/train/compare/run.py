"""The comparison: checks all contenders, simulates them, and then trains one after another; and its HTML page.

The page has all in one file: headline, table, throughput, memory, timelines and loss.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import accumulate
from pathlib import Path

from penstock.cost import Costs
from penstock.draw.chart import Axis, Bars, Figure, Line, bar_chart, line_chart, save_chart
from penstock.draw.charts.lines import averaged
from penstock.draw.report_page import PageNumber, inline, section, table, timelines, whole_page
from penstock.draw.scale import percent, short
from penstock.formats.files import write_whole
from penstock.schedule import Schedule
from penstock.simulation.simulator import untimed_kinds
from penstock.train.checks import SettingsError
from penstock.train.compare.contenders import shown_name
from penstock.train.compare.result import (
    AS_PLANNED,
    MIB,
    Comparison,
    ComparisonRow,
    Costing,
    SimulatedRun,
    simulated,
    trained,
)
from penstock.train.inputs import Inputs, gather_inputs
from penstock.train.settings import Settings
from penstock.train.tasks.open import schedule_of

MOST_POINTS = 80
"""Most points of a line. If there are more steps, neighbours are averaged."""
MOST_OPS = 8000
"""Most ops that a page draws. More would make the page slow."""
CHART = 760
"""Pixels of a chart that is a file by itself."""
COLUMNS = (
    "Speed: how many times as fast as the first schedule. Busy: share of all ranks' time in which they run ops or "
    "update. Memory and activations: of the rank that holds most. Mismatch: most updates between a microbatch's "
    "forward and its backward. Versions: most copies of its weights that a stage keeps."
)
LEARNED = (
    " Weights: bytes of weights, versions, gradients and optimizer state on the rank that has most, counted while it "
    "trained. Train loss: mean of the last tenth of the steps. Validation: loss on the validation data at the end."
)


def to_page(found: Comparison) -> str:
    """The page. It loads nothing from elsewhere, and looks the same on a screen and on a phone, light and dark."""
    return whole_page(
        title=f"{', '.join(row.name for row in found.rows)}: compared",
        name=" · ".join(row.name for row in found.rows),
        headline=headline(found),
        more=[f"{line[0].upper()}{line[1:]}." for line in [*found.words(), *found.notices]],
        numbers=_numbers(found),
        facts=_facts(found),
        sections=_sections(found),
        data=found.to_json(),
    )


def write_page(found: Comparison, folder: Path) -> dict[str, str]:
    """Writes compare.html, and the charts of the loss as SVG. Returns their paths."""
    drawn = loss_charts(found, CHART)
    for name, chart in drawn.items():
        save_chart(chart, folder / f"{name}.svg")
    write_whole(folder / "compare.html", to_page(found))
    return {"page": str(folder / "compare.html")} | {name: str(folder / f"{name}.svg") for name in drawn}


def headline(found: Comparison) -> str:
    """Which is fastest, and what that costs in loss, in one sentence."""
    first = found.rows[0]
    if len(found.rows) == 1:
        return f"{first.name} runs {found.throughput(first)}."
    best = found.best
    if best is None:
        return f"None of them fits into {(found.memory_limit or 0.0) / MIB:,.1f} MiB."
    if best is first or found.speedup(best) < 1.005:
        none = "None" if found.memory_limit is None else "None that fits"
        said = f"{none} is faster than {first.name}, which runs {found.throughput(first)}"
        return f"{said}."
    fits = "" if found.memory_limit is None else "fits and "
    said = f"{best.name} {fits}is {found.speedup(best):.2f} times as fast as {first.name}"
    if best.trained is None or first.trained is None:
        return f"{said}: {found.throughput(best)} against {found.throughput(first)}."
    change = best.trained.loss / first.trained.loss - 1
    if abs(change) < 0.0005:
        return f"{said}, and its validation loss is the same."
    return f"{said}, and its validation loss is {percent(abs(change))} {'higher' if change > 0 else 'lower'}."


def _numbers(found: Comparison) -> list[PageNumber]:
    best = found.best or max(found.rows, key=found.speedup)
    least = min(found.rows, key=found.held)
    numbers = [
        PageNumber(found.throughput(best), f"most: {best.name}", "saved"),
        PageNumber(f"{found.speedup(best):.2f}x", f"as fast as {found.rows[0].name}: {best.name}"),
        PageNumber(f"{short(found.held(least))} {found.held_unit}", f"least on the fullest rank: {least.name}"),
    ]
    learned = [(row.trained.loss, row.name) for row in found.rows if row.trained is not None]
    learned = [each for each in learned if math.isfinite(each[0])]
    if learned:
        low = min(learned)[0]
        names = ", ".join(name for loss, name in learned if f"{loss:.3f}" == f"{low:.3f}")
        numbers.append(PageNumber(f"{low:.3f}", f"lowest validation loss: {names}"))
    return numbers


def _facts(found: Comparison) -> list[tuple[str, str]]:
    return [
        ("ranks", str(found.ranks)),
        ("microbatches per step", str(found.microbatches)),
        ("batch", str(found.batch)),
        ("steps trained", str(found.steps)),
        ("costs", found.costs),
        ("network and dispatch", found.run.words()),
        *([] if found.memory_limit is None else [("memory limit", f"{found.memory_limit / MIB:,.1f} MiB")]),
    ]


def _sections(found: Comparison) -> list[str]:
    note = COLUMNS + (LEARNED if found.steps else "")
    parts = [section("Side by side", table(found.head(), map(found.cells, found.rows), (0,), "Side by side"), note)]
    simulated = escape(f"Simulated, each rank a device of its own, with {found.run.words()}.")
    parts.append(section("Throughput", inline(lambda width: _throughput(found, width)), simulated))
    parts.append(section("Memory", inline(lambda width: _memory(found, width)), f"Of the fullest rank. {simulated}"))
    parts += _timelines(found)
    charts = list(loss_charts(found, CHART))
    if charts:
        drawn = "".join(inline(partial(_loss_chart, found, name)) for name in charts)
        note = (
            "Training loss. By time: each schedule's updates stand where its simulated steps end, so a schedule with "
            "shorter steps ends further left."
        )
        parts.append(section("Loss", drawn, note))
    return parts


def _throughput(found: Comparison, width: int) -> Figure:
    return bar_chart(
        [row.name for row in found.rows],
        [Bars("throughput", [found.per_second(row) for row in found.rows], hue="blue")],
        y=Axis(found.speed_unit),
        show=short,
        width=min(width, CHART),
        height=300,
        label=f"Throughput of each schedule in {found.speed_unit}",
    )


def _memory(found: Comparison, width: int) -> Figure:
    held = [found.held(row) for row in found.rows]
    part = [row.simulated.activations / MIB if found.in_bytes else None for row in found.rows]
    series = [Bars("all that the fullest rank holds" if found.in_bytes else "activations", held, hue="blue")]
    if found.in_bytes:
        series.append(Bars("activations alone", part, hue="amber"))
    return bar_chart(
        [row.name for row in found.rows],
        series,
        y=Axis(found.held_unit),
        width=min(width, CHART),
        height=300,
        label=f"Memory of the fullest rank in each schedule, in {found.held_unit}",
    )


def _timelines(found: Comparison) -> list[str]:
    """A step of each schedule on one time axis. A schedule that drains after several steps has an axis of its own."""
    if sum(len(row.simulated.timeline.ops) for row in found.rows) > MOST_OPS:
        note = f"The timelines have more than {MOST_OPS:,} ops in all, which a page would be slow with."
        return [section("Timelines", f"<p>{note} Draw one with penstock simulate --timeline.</p>")]
    parts = []
    for drain in sorted({row.drain_every for row in found.rows}):
        rows = [row for row in found.rows if row.drain_every == drain]
        drawn = timelines([row.simulated.timeline for row in rows], [row.name for row in rows])
        title = "One step" if drain == 1 else f"{drain} steps, after which the pipeline drains"
        parts.append(section(title, drawn, _said_of_timelines(rows)))
    return parts


def _said_of_timelines(rows: Iterable[ComparisonRow]) -> str:
    synchronous = [row.name for row in rows if row.simulated.timeline.schedule.updates is None]
    if not synchronous:
        return "Simulated over the same costs. The updates (U) are among the other ops."
    return escape(f"Simulated over the same costs, on one time axis. {', '.join(synchronous)}: the update follows.")


def loss_charts(found: Comparison, width: int) -> dict[str, Figure]:
    """The charts of the loss by update and by simulated time; none where nothing was trained."""
    trained = [row for row in found.rows if row.trained is not None]
    if not trained:
        return {}
    by_update, by_time = [], []
    for row in trained:
        assert row.trained is not None
        seconds = list(accumulate([row.simulated.milliseconds / 1e3] * len(row.trained.losses)))
        by_update.append(_line(row, [float(count) for count in row.trained.updates]))
        by_time.append(_line(row, seconds))
    low = 0.95 * min((value for line in by_time for value in line.y if value is not None), default=0.0)
    y, size = Axis("training loss, nats per token" if found.tokens else "training loss", low=low), min(width, CHART)
    return {
        "loss-by-update": line_chart(by_update, title="Loss by update", x=Axis("updates"), y=y, width=size),
        "loss-by-time": line_chart(by_time, title="Loss by time", x=Axis("seconds, simulated"), y=y, width=size),
    }


def _loss_chart(found: Comparison, name: str, width: int) -> Figure:
    return loss_charts(found, width)[name]


def _line(row: ComparisonRow, x: Sequence[float]) -> Line:
    assert row.trained is not None
    places, losses = averaged(x, row.trained.losses, MOST_POINTS)
    return Line(row.name, places, [loss if math.isfinite(loss) else None for loss in losses])


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
    notices = []
    windows = {shown_name(each.schedule): each.passes.window for each in contenders if each.is_asynchronous}
    if any(window != contenders[0].microbatches for window in windows.values()):
        each = ", ".join(f"{window} in {name}" for name, window in windows.items())
        notices.append(f"microbatches that an update gathers: {each}")
    if not trains:
        return notices
    optimizers = {(each.optimizer, json.dumps(dict(each.optimizer_options)), each.lr) for each in contenders}
    if len(optimizers) > 1:
        each = ", ".join(f"{shown_name(one.schedule)} {one.optimizer} at {one.lr:g}" for one in contenders)
        notices.append(f"their optimizers differ: {each}")
    if contenders[0].clip and windows:
        notices.append("asynchronous schedules clip each stage's gradient by itself, the others the whole model's")
    return notices


def _write(found: Comparison, out: Path) -> dict[str, str]:
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "compare.json", json.dumps(found.to_json(), indent=2, allow_nan=False) + "\n")
    return {"json": str(out / "compare.json"), **write_page(found, out)}
