"""The pages on the papers are made out of committed results, and so are the numbers that the README repeats."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from experiments.claims import pages, quick
from experiments.claims.claim import ROOT, Claim, facts_of, rows_of
from experiments.claims.pages import PAPERS, REAL
from experiments.common.record import command, record
from experiments.common.results import facts, find, known, load, named_in, runs, save

pytestmark = pytest.mark.unit

EXPERIMENTS = ROOT / "experiments"
STATES = {
    "done",
    "done for gloo",
    "emulated",
    "simulated",
    "host half",
    "on one GPU",
    "differently",
    "not run",
    "open",
}


def test_every_paper_has_a_page_with_all_of_its_claims() -> None:
    made = pages.pages()
    assert set(made) == {"audit.md", *(f"{paper.key}.md" for paper in PAPERS)}
    for paper in PAPERS:
        text = made[f"{paper.key}.md"]
        assert all(f"| {claim.item} | {claim.what} |" in text for claim in paper.claims)
        assert all(f"## {item.name}: {item.about}" in text for item in paper.items)


def test_each_number_of_a_paper_stands_in_its_texts_and_is_made_out_of_results() -> None:
    reasons = [(pages.PAPER_OF[row["paper"]], row["why"]) for row in pages.audit_as_written()]
    for paper in PAPERS:
        texts = [*paper.texts, *(why for of, why in reasons if of is paper)]
        named = set().union(*map(named_in, texts))
        assert named == set(paper.numbers)
        for number in paper.numbers.values():
            assert re.search(r"\d", number())
        assert not any(named_in(item.reason) for item in paper.items)


def test_a_text_has_numbers_in_place_of_names_and_an_unknown_name_is_refused() -> None:
    paper = replace(PAPERS[0], numbers={"late, 30B": lambda: "1037"})
    assert paper.filled("It took {late, 30B} ms, and 5% more.") == "It took 1037 ms, and 5% more."
    with pytest.raises(ValueError, match=r"names early in braces.*add it there"):
        paper.filled("{early} and {late, 30B}")


def test_the_audit_has_every_row_with_evidence_that_is_there() -> None:
    rows = pages.audited()
    assert len(rows) == 97
    assert len({(row["paper"], row["item"]) for row in rows}) == 97
    for row in rows:
        assert row["state"] in STATES, row
        assert row["evidence"] or row["why"], row
        assert row["why"] or row["state"] == "done", "what is not simply done has its reason"
        for each in row["evidence"]:
            path, _, test = each.partition("::")
            assert path.startswith(pages.SITE) or (ROOT / path).exists(), each
            if path.startswith(("tests/", "experiments/tests/")):
                assert calls(source_of(ROOT / path, test), row["calls"]), f"{each} has none of {row['calls']}"


def source_of(path: Path, test: str) -> str:
    """The source of a test, with its decorators, or of a whole file of tests."""
    text = path.read_text(encoding="utf-8")
    if not test:
        return text
    (found,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == test)
    first = min(node.lineno for node in (found, *found.decorator_list))
    return "\n".join(text.splitlines()[first - 1 : found.end_lineno])


def calls(source: str, names: list[str]) -> bool:
    """Whether a test's source has one of the names of the feature that a row of the audit is about."""
    return any(re.search(rf"(?<![A-Za-z]){re.escape(name)}", source) for name in names)


def test_a_row_of_the_audit_that_cites_a_test_of_something_else_is_found() -> None:
    here = Path(__file__)
    own = source_of(here, "test_the_readme_calls_rows_of_the_audit_open_only_where_some_are")
    assert calls(own, ["audited"])
    assert not calls(own, ["slow_link_schedule"])
    with pytest.raises(ValueError, match="not enough values"):
        source_of(here, "test_that_is_not_there")


def test_the_readme_calls_rows_of_the_audit_open_only_where_some_are() -> None:
    states = {row["state"] for row in pages.audited()}
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert ("still open](docs/papers.md)" in text) == ("open" in states)
    assert ("only emulated or simulated](docs/papers.md)" in text) == bool(states & {"emulated", "simulated"})
    assert states <= {"done", *pages.MEANINGS}


FROM_HISTORY = {
    "pipemorph": "figure10-gpu figure21_gpu-2ranks figure21_gpu-4ranks",
}
"""Results from before each had its record, which was put down afterwards. One that is run again leaves this list."""


def test_every_result_has_its_record() -> None:
    from_history: dict[str, list[str]] = {}
    with_changes: dict[str, list[str]] = {}
    for path in sorted(EXPERIMENTS.glob("*/results/*.json")):
        paper, name = path.parts[-3], path.stem
        if paper == "uneven":
            cells = json.loads(path.read_text(encoding="utf-8")).values()
            assert all(complete(cell, of_all=True) for cell in cells), path
            if any(cell["commit"].endswith("+") for cell in cells):
                with_changes.setdefault(paper, []).append(name)
            continue
        found, rows = facts_of(f"{paper}/{name}"), rows_of(f"{paper}/{name}")
        runs = [*found.get("earlier", ()), found["record"]]
        runs_of_all = (*runs, *([found["measured"]] if "measured" in found else []))
        if any(each["commit"].endswith("+") for each in runs_of_all):
            with_changes.setdefault(paper, []).append(name)
        for each in runs_of_all:
            assert complete(each, of_all=not each.get("from_history")), path
            if each.get("from_history") and name not in from_history.setdefault(paper, []):
                from_history[paper].append(name)
        if len(runs) > 1:
            assert {row["run"] for row in rows} <= set(range(len(runs))), path
    said = {paper: " ".join(names) for paper, names in from_history.items()}
    assert said == FROM_HISTORY, "take what was run again out of the list"
    assert with_changes == {}, "rows of a checkout whose sources differed from its commit: run them from a clean one"


def complete(of: dict[str, Any], of_all: bool) -> bool:
    """Whether a record says commit, command and machine; with `of_all` the seeds that were drawn and the load too."""
    said = (
        re.fullmatch(r"[0-9a-f]{40}\+?", of["commit"])
        and re.match(r"python (-m experiments\.|experiments/)", of["command"])
        and of["machine"]["processor"]
        and of["machine"]["num_processors"] > 0
    )
    return bool(said) and (not of_all or (isinstance(of["seeds"], list) and len(of["load"]) == 3))


def test_every_figure_of_a_page_has_a_command_that_is_there() -> None:
    for paper in PAPERS:
        for item in paper.items:
            assert item.reason or item.files, item.name
            if item.command:
                module = item.command.partition(" ")[0].replace(".", "/")
                assert (EXPERIMENTS / f"{module}.py").exists()


def test_numbers_of_the_experiments_readmes_are_those_of_the_results() -> None:
    """Most stand in a table of a page; these are told in the readmes alone."""
    texts = {
        paper: " ".join((EXPERIMENTS / paper / "README.md").read_text(encoding="utf-8").split())
        for paper in ("amdp", "flexpipe", "pipemorph")
    }
    formulas = rows_of("amdp/table1")
    held = {row["d"]: row["activations"] / row["d"] for row in formulas if row["method"] == "amdp"}
    assert f"up to {held[4]:g} d at d = 4 and {held[8]:g} d at d = 8" in texts["amdp"]
    zb_v = find(formulas, method="zb-v", d=8, n=32)["bubble"]
    assert f"ZB-V's {zb_v:.1%} come before" in texts["amdp"]
    (ours,) = (row for row in rows_of("pipemorph/figure22-simulate") if row["system"] == "ours")
    assert f"Figure 22 is at {60e3 / fmean(ours['simulated_ms']):.1f} again" in texts["pipemorph"]
    fits = [
        row for row in rows_of("flexpipe/figure13") if row["method"] == "Megatron-LM" and row["samples"] is not None
    ]
    most = max(fits, key=lambda row: row["vocabulary"])
    assert most["recompute"] == "full"
    assert (
        f"Megatron-LM has room for {most['vocabulary']}K words at most, and there it computes every block again"
        in (texts["flexpipe"])
    )


def test_the_table_of_real_computation_has_no_more_ranks_than_cores() -> None:
    value = json.loads(REAL.read_text(encoding="utf-8"))
    assert all(row["pp"] <= value["machine"]["num_processors"] for row in value["rows"])
    assert len(list(pages.real_rows(value))) == len(value["rows"])


def test_trained_losses_stand_in_a_column_of_their_own() -> None:
    for paper in PAPERS:
        head, _, *rows = pages._claims(paper.claims)
        trained = [claim for claim in paper.claims if claim.trained]
        assert head.endswith("| by the clock | trained |" if trained else "| by the clock |")
        assert {row.count("|") for row in rows} == {head.count("|")}
        for claim in trained:
            assert claim.shown("trained")
            assert not claim.shown("simulated")
            assert not claim.shown("measured")
        again = sum(claim.again is not None for claim in paper.claims)
        assert f"simulates {again} of the {len(rows)} rows of this table anew" in pages.page(paper)


def of_figure(item: str) -> list[Claim]:
    return [claim for paper in PAPERS for claim in paper.claims if claim.item == item]


def test_a_headline_simulated_again_is_the_same_to_the_digit() -> None:
    for claim in of_figure("Figure 5"):
        assert claim.again is not None
        assert quick.compared("pipemorph", claim, list(claim.again())).same


def test_a_headline_that_has_changed_is_said_and_ends_with_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = of_figure("Figure 5")[1]
    rows = [row | {"simulated_ms": [row["simulated_ms"][0] + 1]} for row in claim.again() or ()]  # type: ignore[misc]
    found = quick.compared("pipemorph", claim, rows)
    assert not found.same
    monkeypatch.setattr(quick, "simulated", lambda: iter([replace(found, same=True), found]))
    monkeypatch.setattr("sys.argv", ["quick", "--no-measured"])
    assert quick.main() == 1
    assert "NOT" in capsys.readouterr().out


def test_a_record_says_what_was_run_and_where(tmp_path: Path) -> None:
    save(tmp_path, "sample", [{"a": 1.23456789, "b": float("inf")}], seeds=range(2), note="here")
    assert load(tmp_path, "sample") == [{"a": 1.23457, "b": None}]
    value = json.loads((tmp_path / "sample.json").read_text(encoding="utf-8"))
    assert value["note"] == "here"
    assert value["record"]["seeds"] == [0, 1]
    assert value["record"]["machine"]["num_processors"] >= 1
    assert len(value["record"]["load"]) == 3
    assert set(record()) == {"commit", "command", "machine", "load"}
    script = str(EXPERIMENTS / "pipemorph" / "figure5.py")
    assert (
        command([script, "--out", "elsewhere", "--jobs", "2"]) == "python -m experiments.pipemorph.figure5 --jobs 2"
    )


def test_rows_of_several_runs_say_which_run_found_them(tmp_path: Path) -> None:
    assert known(tmp_path, "sample") == runs(tmp_path, "sample") == []
    save(tmp_path, "sample", [{"a": 1}], seeds=[0])
    first = facts(tmp_path, "sample")["record"]
    rows, earlier = known(tmp_path, "sample"), runs(tmp_path, "sample")
    rows.append({"a": 2})
    save(tmp_path, "sample", rows, seeds=[1], earlier=earlier)
    save(tmp_path, "sample", [*rows, {"a": 3}], seeds=[1], earlier=earlier)
    assert load(tmp_path, "sample") == [{"a": 1, "run": 0}, {"a": 2, "run": 1}, {"a": 3, "run": 1}]
    assert facts(tmp_path, "sample")["earlier"] == [first]
    assert [each["seeds"] for each in runs(tmp_path, "sample")] == [[0], [1]]
    assert known(tmp_path, "sample", resume=False) == runs(tmp_path, "sample", resume=False) == []


def test_what_is_measured_later_leaves_the_record_of_the_rows(tmp_path: Path) -> None:
    save(tmp_path, "sample", [{"a": 1, "ms": None}], seeds=[0], limit=60)
    before = facts(tmp_path, "sample")
    save(tmp_path, "sample", [{"a": 1, "ms": 2.0}], measured=True, stretch=2.0)
    after = facts(tmp_path, "sample")
    assert load(tmp_path, "sample") == [{"a": 1, "ms": 2.0}]
    assert {name: after[name] for name in before} == before
    assert after["stretch"] == 2.0
    assert set(after["measured"]) == {"commit", "command", "machine", "load", "seeds"}


def test_results_that_are_not_there_say_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no figure5-threads\.json: run figure5 first"):
        load(tmp_path, "figure5-threads")


def test_long_columns_go_beside_the_results_with_a_checksum(tmp_path: Path) -> None:
    rows = [{"a": 1, "ms": [2.0, 4.0], "starts": [0.0, 2.0]}, {"a": 2, "ms": [3.0]}]
    save(tmp_path, "sample", rows, raw={"ms": lambda ms: [fmean(ms)], "starts": None})
    assert load(tmp_path, "sample") == [{"a": 1, "ms": [3.0]}, {"a": 2, "ms": [3.0]}]
    kept = json.loads((tmp_path / "sample.json").read_text(encoding="utf-8"))["raw"]
    data = (tmp_path / kept["file"]).read_bytes()
    assert (kept["bytes"], kept["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert [json.loads(line) for line in data.splitlines()] == [
        {"ms": [2.0, 4.0], "starts": [0.0, 2.0]},
        {"ms": [3.0]},
    ]
