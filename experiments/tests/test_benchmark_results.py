"""What the benchmarks' READMEs say is what their results say."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.tune import run as tune
from compatibility_cells import read_cells
from documents import ROOT, broken_links
from experiments.common.readme import between
from experiments.common.summary import MOST_LINES
from penstock.schedule.weight_versions import predictions_of

pytestmark = pytest.mark.unit

KINDS = ("same", "different", "raw", "refused", "late", "invalid")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str, monkeypatch: pytest.MonkeyPatch, file: str = "run.py") -> ModuleType:
    """A script of a benchmark."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location(f"{name}_run", BENCHMARKS / name / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


def test_adapt(monkeypatch: pytest.MonkeyPatch) -> None:
    results = json.loads((BENCHMARKS / "adapt/results.json").read_text(encoding="utf-8"))
    readme = (BENCHMARKS / "adapt/README.md").read_text(encoding="utf-8")
    adapt = script("adapt", monkeypatch)
    assert between(readme, "cells").splitlines() == adapt.table(results)
    assert between(readme, "tutorial").splitlines() == adapt.tutorial_table(results)


@pytest.mark.parametrize("name", ["cases", "predictions"])
def test_predictions_on_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads((BENCHMARKS / f"arrive/{name}.json").read_text(encoding="utf-8"))
    readme = (BENCHMARKS / "arrive/README.md").read_text(encoding="utf-8")
    predict = script("arrive", monkeypatch, "predict.py")
    assert between(readme, name).splitlines() == predict.table(f"{name}.json")
    assert found["num"] == (50 if name == "predictions" else 20)
    assert found["median"] <= predict.MEDIAN
    assert found["worst"] <= predict.WORST


@pytest.mark.parametrize("name", ["links", "bounded", "nccl"])
def test_networks_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = json.loads((BENCHMARKS / f"faults/{name}.json").read_text(encoding="utf-8"))["cells"]
    links, readme = script("faults", monkeypatch, "links.py"), (BENCHMARKS / "faults/README.md").read_text()
    assert links.table(cells) in readme
    assert all(cell["equal"] == cell["runs"] == cell["before_the_end"] and not cell["error"] for cell in cells)
    for cell in cells:
        carries = links.CARRYING[cell["transport"]] == cell["network"]
        assert cell["in_transfer"] == (cell["runs"] if carries else 0)
        assert cell["commit"]
        assert cell["command"]
    if name != "bounded":
        assert f"All {sum(cell['runs'] for cell in cells)} runs are right" in " ".join(readme.split())


def test_fuzz() -> None:
    readme = (BENCHMARKS / "fuzz/README.md").read_text(encoding="utf-8")
    for name in ("one-process", "between", "turns", "turns-between"):
        found = json.loads((BENCHMARKS / f"fuzz/{name}.json").read_text(encoding="utf-8"))
        (part,) = (value for value in found.values() if isinstance(value, dict) and "cases" in value)
        mended = found.get("mended since, run again")
        said = ", ".join(f"{part[kind]} {kind}" for kind in KINDS)
        assert f"{part['cases']} cases: {said}" in readme
        assert part["different"] == 0
        assert part["raw"] == (mended is not None)
        assert mended is None or (mended["is"] == "same" and f"seed {mended['case']}" in readme)


def test_fuzz_on_a_gpu() -> None:
    readme = " ".join((BENCHMARKS / "fuzz/README.md").read_text(encoding="utf-8").split())
    for name in ("gpu", "gpu-between"):
        found = json.loads((BENCHMARKS / f"fuzz/{name}.json").read_text(encoding="utf-8"))
        (part,) = (value for value in found.values() if isinstance(value, dict) and "cases" in value)
        said = ", ".join(f"{part[kind]} {kind}" for kind in KINDS)
        assert f"(`{name}.json`), {part['cases']} cases: {said}" in readme


def test_cells_on_a_gpu() -> None:
    readme = " ".join((BENCHMARKS / "compatibility/README.md").read_text(encoding="utf-8").split())
    found = json.loads((BENCHMARKS / "compatibility/gpu.json").read_text(encoding="utf-8"))
    cells, outcomes = read_cells()[:303], found["outcomes"]  # those that there were then
    same = [place for place, said in enumerate(outcomes) if said == "bitwise" or said.startswith("within")]
    assert len(outcomes) == len(cells) == found["cells"] == 303
    assert len(same) == found["same"]
    assert all(outcomes[place] == "bitwise" for place in same if cells[place].exact)
    assert found["wrong"] == []
    assert found["ended"] == found["same"] + found["refused"] == len(cells) - outcomes.count("not run")
    assert f"of 303 cells {found['ended']} had ended" in readme
    assert f"{found['same']} trained, {found['refused']} were refused by the table" in readme
    assert f"{found['bitwise']} had the bits of the loop" in readme


def test_cells_of_the_whole_array_ended_as_the_page_says() -> None:
    readme = " ".join((BENCHMARKS / "compatibility/README.md").read_text(encoding="utf-8").split())
    found, cells = json.loads((BENCHMARKS / "compatibility/results.json").read_text(encoding="utf-8")), read_cells()
    outcomes = found["outcomes"]
    assert len(outcomes) == len(cells) == found["cells"]
    assert found["trained"] == sum(said == "bitwise" or said.startswith("within") for said in outcomes)
    assert all(said == "bitwise" for cell, said in zip(cells, outcomes, strict=True) if cell.exact)
    assert (found["refused"], found["wrong"]) == (0, [])
    assert f"of {found['cells']} cells {found['trained']} trained and none was refused" in readme
    assert f"none was wrong. {outcomes.count('bitwise')} had the bits of the loop" in readme


def test_cells_that_the_table_allows_cover_every_pair_and_triple(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused cell shows nothing of its other features; five triples stood in one alone."""
    run = script("compatibility", monkeypatch)
    assert not run.missing([cell for cell in read_cells() if cell.refusal is None])


def test_rules_that_predict_with_every_other_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair stands in a cell that is not refused, every cell has something to predict, and none is wrong."""
    run, cells = script("compatibility", monkeypatch), read_cells("rules")
    found = json.loads((BENCHMARKS / "compatibility/rules_results.json").read_text(encoding="utf-8"))
    assert len(cells) == len(found["outcomes"]) == found["cells"] <= 40
    assert not run.missing([cell for cell in cells if cell.refusal is None], run.RULES)
    assert all(predictions_of(cell.schedule) for cell in cells)
    assert found["wrong"] == []
    sharded = {cell for cell, said in zip(cells, found["outcomes"], strict=True) if said != "bitwise"}
    assert sharded == {cell for cell in cells if cell.shape[2] > 1}
    table = run.table(cells, found["outcomes"])
    readme = (BENCHMARKS / "compatibility/README.md").read_text(encoding="utf-8")
    assert between(readme, "rules").splitlines() == table


def test_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    run = script("peers", monkeypatch)
    results = json.loads((BENCHMARKS / "peers/results.json").read_text(encoding="utf-8"))["rows"]
    assert run.table(results) in (BENCHMARKS / "peers/README.md").read_text(encoding="utf-8")
    asked = Counter(setting.peer for setting in run.settings())
    assert {row["peer"]: row["settings"] for row in results} == {**asked, "all": 420}


def test_faults() -> None:
    readme = (BENCHMARKS / "faults/README.md").read_text(encoding="utf-8")
    found = json.loads((BENCHMARKS / "faults/results.json").read_text(encoding="utf-8"))["runs"].values()
    runs, wrong = (sum(each[name] for each in found) for name in ("runs", "wrong"))
    assert f"{runs} runs, {wrong} wrong" in readme
    assert wrong == 0


def test_analyze(monkeypatch: pytest.MonkeyPatch) -> None:
    results = json.loads((BENCHMARKS / "analyze/results.json").read_text(encoding="utf-8"))
    readme = (BENCHMARKS / "analyze/README.md").read_text(encoding="utf-8")
    assert script("analyze", monkeypatch).table(results) in readme
    for row in results["traces"]:
        assert row["against_their_replay"] < 0.005
        assert row["against_measured"] <= row["theirs_against_measured"] * 1.001
        assert row["slowdown_off"] < 0.005
    first = {row["trace"]: row["causes"][0] for row in results["traces"]}
    assert first["AR"]["names"] == {"replica": 0, "rank": 0}
    assert first["ST"]["names"] == {"stage": 3}
    assert results["large"]["ops"] >= 230_000
    assert results["large"]["seconds"] < 20


def test_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads((BENCHMARKS / "gaps/results.json").read_text(encoding="utf-8"))["rows"]
    readme = (BENCHMARKS / "gaps/README.md").read_text(encoding="utf-8")
    run = script("gaps", monkeypatch)
    assert run.table(rows) in readme
    assert {row["problems"] for row in rows} == {20}
    assert all(row["mean"] <= run.TARGETS[row["family"]] for row in rows), "the README says that all aims are met"


def test_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are those of the results; no case of any kind is wrong, and uneven microbatches are among them."""
    run = script("proofs", monkeypatch)
    found = run.found_all()
    assert run.table(found) in (BENCHMARKS / "proofs/README.md").read_text(encoding="utf-8")
    assert [found[kind]["all"]["cases"] for kind in ("plain", "uneven")] == [2000, 2000]
    found["again"] = json.loads((BENCHMARKS / "proofs/proofs_again.json").read_text(encoding="utf-8"))
    assert all(each["all"]["wrong"] == 0 for each in found.values())
    for each in found.values():
        assert each["commits"]
        assert each["command"]


def test_rank_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are those of the results; every family loads below the bar."""
    run = script("rank_memory", monkeypatch)
    readme = (BENCHMARKS / "rank_memory/README.md").read_text(encoding="utf-8")
    found = {
        kind: json.loads((BENCHMARKS / f"rank_memory/{kind}.json").read_text(encoding="utf-8"))["rows"]
        for kind in ("loading", "folder", "own", "allocator")
    }
    for kind, rows in found.items():
        assert run.table(kind, rows) in readme
    families = json.loads(run.FAMILIES.read_text(encoding="utf-8"))
    loaded = {row["case"]: max(row["peak"]) for row in found["loading"]}
    assert {*families} - {*run.REFUSED} <= {*loaded}
    assert [name for name in loaded if name in families and loaded[name] >= 0.6] == []
    own = {row["case"]: row["losses"] for row in found["own"]}
    assert own["small"] == own["small, in memory"]
    assert own["large"] == own["large, once more"] == own["large, freed memory given back"]
    assert max(next(row["peak"] for row in found["own"] if "given back" in row["case"])) < 0.6


@pytest.mark.parametrize(
    ("folder", "file", "part", "table", "name"),
    [
        ("mesh", "matrix", "largest", "largest", "matrix"),
        ("mesh", "ddp", "rows", "table", "ddp"),
        ("limits", "starts", "gaps", "table", "starts"),
        ("limits", "pair", "parts", "table", "pair"),
        ("dispatch", "by_sigma", "ways", "table", "by sigma"),
    ],
)
def test_a_table_is_what_its_script_makes_of_the_results(
    folder: str, file: str, part: str, table: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (BENCHMARKS / folder / "run.py").exists():  # which the script beside it imports
        monkeypatch.setitem(sys.modules, "run", script(folder, monkeypatch))
    found = json.loads((BENCHMARKS / folder / f"{file}.json").read_text(encoding="utf-8"))[part]
    readme = (BENCHMARKS / folder / "README.md").read_text(encoding="utf-8")
    made = getattr(script(folder, monkeypatch, f"{file}.py"), table)(found)
    assert between(readme, name).splitlines() == made


TUNED = ("tune.md", "tutorials/choose-schedule.md")


def test_tune() -> None:
    """How far predictions are off, in the guides."""
    rows = json.loads((BENCHMARKS / "tune/results.json").read_text(encoding="utf-8"))["rows"]
    readme = (BENCHMARKS / "tune/README.md").read_text(encoding="utf-8")
    assert tune.table(rows) in readme
    offs = [row["off"] for row in rows]
    span, worst = (
        f"{100 * min(offs):.0f} to {100 * max(offs):.0f}%",
        f"{100 * max(row['worst'] for row in rows):.0f}%",
    )
    guide, choose = (" ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split()) for name in TUNED)
    assert f"were {span} off in the median, and single rounds up to {worst}" in guide
    assert f"were [{span} off](../../benchmarks/tune/README.md) in the median," in choose
    assert f"in the median, and single rounds up to {worst}." in choose
    assert max(offs) <= 0.1, "what the page says of the aim"
    by = {(row["schedule"], row["pp"], row["dp"]): row for row in rows}
    plain = by["1f1b", 2, 1]
    for name in ("interleaved-1f1b", "chimera"):
        assert by[name, 2, 1]["predicted_ms"] < plain["predicted_ms"], "the tuner ranks it above 1f1b"
        assert by[name, 2, 1]["measured_ms"] < plain["measured_ms"], "and so does the clock"
    most = max(abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in rows)
    assert f"Memory is within {math.ceil(100 * most)}%" in readme


def test_the_index_has_every_folder_with_the_figures_of_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    index = script("", monkeypatch, "index.py")
    assert index.tables() in (BENCHMARKS / "README.md").read_text(encoding="utf-8"), "run python benchmarks/index.py"
    listed = [each.folder for each in index.benchmarks()]
    assert sorted(listed) == sorted(path.parent.name for path in BENCHMARKS.glob("*/README.md"))
    assert broken_links(BENCHMARKS / "README.md") == []


SUMMARIES = {path.relative_to(BENCHMARKS).as_posix() for path in BENCHMARKS.glob("*/*.json")} - {
    "compatibility/cells.json"
}


@pytest.mark.parametrize("file", sorted(SUMMARIES))
def test_what_is_kept_of_a_run_is_short_enough_to_be_read(file: str) -> None:
    text = (BENCHMARKS / file).read_text(encoding="utf-8")
    assert text.count("\n") <= MOST_LINES, "put means, medians and extremes there, by save_summary"


NOT_RECORDED = {
    "analyze": "results", "compatibility": "gpu", "delegate": "results",
    "dispatch": "emulated", "emulated": "processes-stretch-2 threads-stretch-2",
    "engine": "results", "faults": "mptcp results", "fuzz": "gpu planted-before",
    "gaps": "optimum results", "head_of_line": "threads", "lab": "interface links others store",
    "late_link": "plans results", "limits": "results",
    "peers": "results", "plan": "free speed tight tight_32x128 tight_8x32", "play": "results",
    "profiling": "results", "space": "results", "split": "compiled results",
    "uneven": "times",
}  # fmt: skip
"""Results from before their scripts recorded commit, command, machine and load; one that is run again leaves it."""


def test_the_index_says_what_results_do_not_record_and_no_file_joins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    index = script("", monkeypatch, "index.py")
    page = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert between(page, "records").splitlines() == index.records(), "run python benchmarks/index.py"
    found: dict[str, list[str]] = {}
    for name in index.not_recorded():
        folder, _, file = name.partition("/")
        found.setdefault(folder, []).append(file.removesuffix(".json"))
    said = {folder: set(files.split()) for folder, files in NOT_RECORDED.items()}
    assert {folder: set(files) for folder, files in found.items()} == said, "take what was run again out of the list"


OF_SEVERAL_RUNS = {"benchmarks/proofs/run.py"}
"""Scripts whose files are of many runs, at several commits and loads, which they put together themselves."""
NO_RECORDS = {
    "benchmarks/adapt/ranks.py": "run.py writes what its runs have measured",
    "benchmarks/runtime/rank.py": "run.py writes what its ranks have measured",
    "benchmarks/arrive/ranks.py": "predict.py writes what its ranks have measured",
}


def test_every_script_writes_the_whole_record_by_one_function() -> None:
    by_parts = set()
    for path in ROOT.glob("benchmarks/*/*.py"):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        if not re.search(r"write_text\(|save_summary\(", text) or name in NO_RECORDS:
            continue
        by_save = "experiments.common.results import" in text and "save(" in text
        if not by_save and not re.search(r"\brecord(\"\])?\(", text):
            by_parts.add(name)
            assert all(part in text for part in ("commit(", "machine(", "getloadavg(", '"command"')), name
    assert by_parts == OF_SEVERAL_RUNS


def test_a_result_says_its_run_only_where_every_row_does_and_from_sources_as_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any row's load once counted for the whole file, words counted for a load, and a commit with changes did."""
    says = script("", monkeypatch, "index.py").says
    run = {
        "commit": "0123abc" * 5 + "01234",
        "command": "python a.py",
        "machine": {"processor": "x"},
        "load": [1, 2, 3],
    }
    for what in run:
        for whole in (run, {"record": run, "rows": [{"a": 1}]}, {"rows": [run, run]}, [run]):
            assert says(whole, what)
        without = {name: each for name, each in run.items() if name != what}
        for part in (without, {"rows": [run, without]}, [without], [], {"rows": []}):
            assert not says(part, what)
    assert says({"commits": {run["commit"]: 2000}}, "commit")
    assert says({"commits": {"zb": run["commit"]}}, "commit")
    for what, value in (
        ("commit", f"{run['commit']}+"), ("commit", ""), ("commits", {f"{run['commit']}+": 3}), ("commits", {}),
        ("command", ""), ("machine", {"cpus": 2}), ("machine", {}), ("load", "beside other work"), ("load", []),
    ):  # fmt: skip
        assert not says({what: value}, what.removesuffix("s"))


def test_the_index_has_commands_that_the_folders_readmes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in script("", monkeypatch, "index.py").benchmarks():
        readme = (BENCHMARKS / each.folder / "README.md").read_text(encoding="utf-8")
        assert each.command in " ".join(readme.split()), each.folder
        _, first, *rest = each.command.split()
        assert (ROOT / (rest[-1] if first == "-m" else first)).is_file(), each.command
