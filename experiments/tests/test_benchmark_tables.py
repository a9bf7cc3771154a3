"""Tables of benchmarks' READMEs that were pasted, or shaped by hand: every number in them is that of the results.

Tables that a script writes between two comments are in `test_benchmark_results.py`.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.profiling import run as profiling
from benchmarks.runtime import run as runtime
from benchmarks.space import run as space
from benchmarks.split import run as split
from hf_families import REFUSED

pytestmark = pytest.mark.unit

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def read(file: str) -> Any:
    return json.loads((BENCHMARKS / file).read_text(encoding="utf-8"))


def lines_of(folder: str) -> list[str]:
    """Of its README, with single spaces."""
    text = (BENCHMARKS / folder / "README.md").read_text(encoding="utf-8")
    return [" ".join(line.split()) for line in text.splitlines()]


def rows_of(folder: str, *head: str) -> Iterator[list[str]]:
    """The cells of each row of the one table that begins with these cells."""
    lines, begin = lines_of(folder), " ".join(f"| {' | '.join(head)} |".split())
    (at,) = [place for place, line in enumerate(lines) if line.startswith(begin)]
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def shows(cell: str, value: float) -> bool:
    """Whether a cell shows a value, to the digits that it has."""
    number = re.fullmatch(r"\*{0,2}(-?[\d,]+(?:\.(\d+))?)(%?)\*{0,2}", cell)
    assert number is not None, cell
    shown = f"{value * (100 if number[3] else 1):.{len(number[2] or '')}f}"
    return shown == number[1].replace(",", "")


def show(cells: Sequence[str], *values: float) -> bool:
    return all(shows(cell, value) for cell, value in zip(cells, values, strict=True))


def script(file: str) -> ModuleType:
    """A script of a benchmark."""
    spec = importlib.util.spec_from_file_location("benchmark", BENCHMARKS / file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def table_lines(text: str) -> list[str]:
    """The lines of a table, with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    ("file", "part", "table"),
    [
        ("profiling/results", "rows", profiling.table),
        ("split/results", "rows", split.table),
        ("split/compiled", "rows", split.table),
        ("space/results", "searches", space.search_table),
        ("space/results", "library", space.library_table),
        ("space/results", "shared_ends", space.shared_table),
        ("engine/results", "rows", script("engine/run.py").table),
        ("delegate/results", "", script("delegate/measure.py").table),
    ],
)
def test_a_table_as_its_command_prints_it(file: str, part: str, table: Callable[[Any], str]) -> None:
    found = read(f"{file}.json")
    lines = table_lines(table(found[part] if part else found))
    assert len(lines) > 2
    page = [*lines_of(file.partition("/")[0]), ""]
    (at,) = [place for place in range(len(page)) if page[place : place + len(lines)] == lines]
    assert not page[at + len(lines)].startswith("|")


def test_speeds_of_list_scheduling() -> None:
    rows = list(rows_of("plan", "ranks", "microbatches", "ops", "listed ms"))
    for cells, row in zip(rows, read("plan/speed.json")["speeds"], strict=True):
        assert cells[:3] == [str(row[name]) for name in ("num_ranks", "num_microbatches", "num_ops")]
        per_op = row["list_ms"] / row["num_ops"] * 1e6
        assert show(cells[3:], row["list_ms"], row["time_ms"], per_op, row["peak_mib"])


def test_gaps_of_plans_without_a_cap() -> None:
    rows = list(rows_of("plan", "ranks", "microbatches", "problems", "first gap"))
    for cells, family in zip(rows, read("plan/free.json")["families"], strict=True):
        assert cells[:3] == [str(family[name]) for name in ("num_ranks", "num_microbatches", "num_problems")]
        first, gap, seconds = (family[name] for name in ("fast_gap", "gap", "seconds"))
        shown = first["mean"], family["fast_ms"]["median"], gap["mean"], gap["most"], seconds["mean"]
        assert show(cells[3:], *shown)


def test_gaps_of_plans_under_a_tight_cap() -> None:
    families = {
        (str(family["num_ranks"]), f"{family['num_microbatches']}{said}"): family
        for file, said in (("tight", ""), ("tight_8x32", ", in a quiet moment"), ("tight_32x128", ""))
        for family in read(f"plan/{file}.json")["families"]
    }
    rows = list(rows_of("plan", "ranks", "microbatches", "problems", "limit s"))
    assert len(rows) == len(families)
    for cells in rows:
        family = families[cells[0], cells[1]]
        assert cells[2:4] == [str(family["num_problems"]), f"{family['time_limit']:g}"]
        listed, gap, above, seconds = (
            family[name]["mean"] for name in ("listed_above_jackson", "gap", "above_jackson", "seconds")
        )
        assert show(cells[4:], listed, gap, family["gap"]["most"], above, seconds)


def test_faults_in_the_lab() -> None:
    found = {
        fault: row
        for file in ("interface", "others", "store")
        for fault, row in read(f"lab/{file}.json")["summary"].items()
        if fault != "none"
    }
    rows = list(rows_of("lab", "fault", "runs"))
    assert len(rows) == len(found)
    for cells in rows:
        row = found.pop(re.findall(r"`(\w+)`", cells[0])[0])
        assert row["all_equal"]
        assert row["all_messages_once"]
        waits = [] if cells[2] == "" else [row["median_wait_s"], row["longest_wait_s"]]
        assert show([cell for cell in cells[1:5] if cell], row["num_runs"], *waits, row["longest_step_s"])


def test_links_in_the_lab() -> None:
    for cells, row in zip(rows_of("lab", "condition, each way"), read("lab/links.json")["rows"], strict=True):
        assert cells[0] == f"`{row['condition']}`"
        assert show(cells[1:], row["round_trip_ms"], row["least_round_trip_ms"], row["transfer_ms"])


@pytest.mark.parametrize(
    ("head", "pipeline"), [("`gpt2-7b`, 4 ranks, 30 ms", "gpt2-7b"), ("8 ranks, 60 ms", "8 ranks")]
)
def test_head_of_line_blocking(head: str, pipeline: str) -> None:
    last, ms = ("2:3", 30) if pipeline == "gpt2-7b" else ("6:7", 60)
    found = {
        (row["schedule"], row["links"], row["transport"], row["depth"]): row
        for row in read("head_of_line/threads.json")["rows"]
        if row["pipeline"].startswith(pipeline)
    }
    rows = list(rows_of("head_of_line", head))
    assert len(rows) >= 5
    for what, by, *numbers in rows:
        schedule, which, how = re.findall(r"(\w+), (first|last) link (occupied|late)", what)[0]
        transport, _, depth = by.partition(", depth ")
        kind = {"occupied": "occupancy", "late": "latency"}[how]
        of = None if transport == "delegate" else int(depth or 2)
        row = found[schedule, f"{'0:1' if which == 'first' else last}={kind}:{ms}ms", transport, of]
        assert show(numbers[:2], row["simulated"], row["measured"])
        if numbers[2:]:
            assert numbers[2] == ("" if row["paper"] is None else f"{row['paper']:.2f}")


EMULATED = {
    "threads, stretch 2": "threads-stretch-2",
    "processes, stretch 2": "processes-stretch-2",
}


def test_errors_of_emulated_steps() -> None:
    rows = list(rows_of("emulated", "", "steps"))
    assert [cells[0] for cells in rows] == list(EMULATED)
    for what, steps, *numbers in rows:
        num_steps, *errors = read(f"emulated/{EMULATED[what]}.json")["errors"]["all"].values()
        assert steps == str(num_steps)
        assert show(numbers, *errors)
    for what, *cells in rows_of("emulated", "", "4 frozen"):
        found = read(f"emulated/{what}-stretch-2.json")["errors"]
        keys = [f"{ranks} {dispatch}" for ranks in (4, 8, 16) for dispatch in ("frozen", "dynamic")]
        for cell, key in zip(cells, keys, strict=True):
            errors = (found[key][name] for name in ("median", "calibrated_median"))
            assert show(re.findall(r"[\d.]+%", cell), *errors)


def test_what_a_step_costs_beside_torch() -> None:
    lines = table_lines(runtime.table(read("runtime/in_turns.json")["rows"]))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    without = cells[0].index("peak memory MiB")
    rows = [f"| {' | '.join(row[:without] + row[without + 1 :])} |" for row in cells]
    page = lines_of("runtime")
    assert sum("tiny" in row or "small" in row for row in rows) == 12
    assert [row for row in rows if "---" not in row and row not in page] == []
    shares = script("runtime/parts.py").shares_of_torch(read("runtime/in_turns.json")["rows"])
    assert [row for row in shares if " ".join(row.split()) not in page] == []


def test_where_the_time_of_a_step_goes() -> None:
    found = read("runtime/parts.json")
    lines = [" ".join(line.split()) for line in script("runtime/parts.py").table(found["rows"])]
    assert [line for line in lines if line not in lines_of("runtime")] == []
    assert len(found["rows"]) == 9


def test_families_that_train() -> None:
    """Whether they do is tested for each in `test_hf_families.py`."""
    families = read("hf_families/families.json")
    assert set(REFUSED) < set(families)
    said = f"{len(families) - len(REFUSED)} of {len(families)} families train, equal to the bit."
    assert said in " ".join(lines_of("hf_families"))


def test_what_the_exact_solver_says() -> None:
    found = {(row["family"], row["number"]): row for row in read("gaps/optimum.json")["rows"]}
    rows = list(rows_of("gaps", "problem", "ranks", "our bound"))
    assert [cells[0] for cells in rows] == ["circular 5", "circular 10", "partial freeing 7"]
    for name, _, _, bound, value, _ in rows:
        family, _, number = name.rpartition(" ")
        row = found[family, int(number)]
        assert show((bound, value), row["bound"], row["value"])
        assert row["proved"] == (row["bound"] == row["value"])
