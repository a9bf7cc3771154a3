"""`penstock search`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.cli.search import WORDS
from penstock.planning.program_search import CONSTRUCTED, Found, placements_of, rules_of


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["search", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_names_the_best_of_each_placement_and_draws_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--ranks", "2", "--microbatches", "4", "--placement", "v-shape", "--placement", "wave")
    assert code == 0
    assert "programs tried" in out
    times = [line.split(" ms")[0].strip() for line in out.splitlines() if " ms  bubble" in line]
    assert times == ["12.25", "12.5"]
    assert out.startswith("rank 0") or "rank 0 |" in out


def test_json_holds_all_of_it_and_out_writes_a_valid_schedule(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "best.json"
    code, out, _ = run(
        capsys, "--ranks", "2", "--microbatches", "4", "--memory-limit", "8", "--json", "--out", str(path)
    )
    value = json.loads(out)
    assert code == 0
    best = ps.load(path)
    ps.check(best)
    assert ps.parse(value["grid"]) == best
    assert value["found"][0]["makespan"] == value["makespan"] == 12
    assert {found["placement"] for found in value["found"]} >= {"one-to-one", "v-shape+bidirectional"}


def test_each_name_is_explained_where_it_stands_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--ranks", "2", "--microbatches", "4")
    code, out, _ = run(capsys, *few, "--placement", "one-to-one", "--placement", "one-to-one+bidirectional")
    listed = "".join(line for line in out.splitlines() if " ms  bubble" in line)
    explained = [line.split("  ")[0] for line in out.rpartition("\n\n")[2].splitlines()]
    assert code == 0
    assert {"one-to-one", "+bidirectional", "F, B", "breadth-first", "peak"} <= set(explained)
    assert not {"wave", "circular", "v-shape", "shared-ends", "zb-v"} & set(explained)
    assert all(word in listed for word in explained if word != "F, B")
    _, out, _ = run(capsys, *few, "--placement", "wave", "--shared-ends")
    assert {"wave", "shared-ends"} <= {line.split("  ")[0] for line in out.splitlines()}


def test_there_is_no_name_that_is_not_explained() -> None:
    kinds, traversals = set(), set()
    for name, placement in placements_of(4, 16).items():
        assert set(name.replace("+", " +").split()) <= WORDS.keys()
        for rules in rules_of(name, placement, 4, 8, None, ps.Costs.uniform(16), True):
            program = ps.Program(placement, 8, rules)
            _, kind, forward, backward = Found(name, program, 0.0).name.split(", ")
            kinds.add(kind)
            traversals |= {each[2:].removesuffix(" by 4") for each in (forward, backward)}
    assert kinds | traversals | set(CONSTRUCTED) <= WORDS.keys()
    assert len(kinds) == 3
    assert len(traversals) == 4


def test_the_peak_is_below_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--ranks", "2", "--microbatches", "4", "--memory-limit", "6", "--json")
    peaks = [found["peak_activations"] for found in json.loads(out)["found"]]
    assert 0 < max(peaks) <= 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "3"], "do not divide among 2 ranks"),
        (["--f", "-1"], "give a number of at least 0"),
        (["--f", "1,2"], "--f has 2 entries; give one, or one per part: 8"),
        (["--placement", "spiral"], "no placement is named 'spiral'"),
        (["--memory-limit", "0.1"], "raise the limit"),
        (["--link", "0:5=3"], "ranks go from 0 to 1"),
        (["--out", "best.csv", "--placement", "wave+bidirectional"], "name placements without +bidirectional"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, out, err = run(capsys, "--ranks", "2", "--microbatches", "4", *words)
    assert code in (1, 2)
    assert message in err
    assert not out
