"""`penstock plan --placement all`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.cli.search import NAMES_IN_DOCS
from penstock.formats.costs import read_costs
from penstock.planning.programs import CONSTRUCTED, Found, fold, placements_of, rules_of

ROOT = Path(__file__).parents[2]
ONE = ("--placement", "one-to-one", "--placement", "one-to-one")
"""A search of one placement alone: two names are searched, and one is planned."""
BIDIRECTIONAL = ("--placement", "wave+bidirectional", "--placement", "v-shape+bidirectional")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    if "--placement" not in words:
        words = (*words, "--placement", "all")
    code = main(["plan", *words])
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


def test_the_docs_explain_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--ranks", "2", "--microbatches", "4", *ONE)
    assert out.endswith(f"names are explained in {NAMES_IN_DOCS}\n")
    page, _, heading = NAMES_IN_DOCS.partition(", ")
    section = (ROOT / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    explained = {word for name in re.findall("`([^`]*)`", section) for word in name.replace("F ", "").split(", ")}
    kinds, traversals = set(), set()
    for name, placement in placements_of(4, 16).items():
        assert set(name.replace("+", " +").split()) <= explained
        for rules in rules_of(name, placement, 4, 8, None, ps.Costs.uniform(16), True):
            program = ps.Program(placement, 8, rules)
            _, kind, forward, backward, *warmup = Found(name, program, 0.0).name.split(", ")
            assert all(word.startswith("warm-up ") for word in warmup)
            kinds.add(kind)
            traversals |= {each[2:].removesuffix(" by 4") for each in (forward, backward)}
    assert kinds | traversals | set(CONSTRUCTED) <= explained
    assert len(kinds) == 3
    assert len(traversals) == 4


def test_the_peak_is_below_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--ranks", "2", "--microbatches", "4", "--memory-limit", "6", "--json")
    peaks = [found["peak_activations"] for found in json.loads(out)["found"]]
    assert 0 < max(peaks) <= 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "3"], "do not divide among 2 ranks"),
        (["--f", "-1"], "give a number of at least 0"),
        (["--f", "1,2"], "--f has 2 entries; give one, or one per part: 8"),
        (["--placement", "spiral", "--placement", "wave"], "no placement is named 'spiral'"),
        (["--memory-limit", "0.1"], "raise the limit"),
        (["--memory-limit", "0"], "--memory-limit 0: 0 is no limit; give what is above 0"),
        (["--memory-limit", "nan,1"], "nan is no limit"),
        (["--memory-limit", "8,8,8"], "--memory-limit 8,8,8 has 3 entries; give one, or one per rank: 2"),
        (["--memory-limit", "8GiB,8"], "8 has no unit and 8GiB has one"),
        (["--memory-limit", "8GiB"], "these costs do not say what weights take"),
        (["--memory-limit", "20GiB", "--costs", "gpt2-7b"], "rank 0 holds 55.57 GiB of weights, gradients and opt"),
        (["--costs", "gpt2-7b", "--stages", "8"], "leave --stages out"),
        (["--costs", "gpt2-7b", "--placement", "shared-ends"], "what a rank's part of a shared stage takes"),
        (["--offload", "any"], "--offload is for a plan with one placement"),
        (["--time", "1"], "--time is for a plan with one placement"),
        (["--costs", "gpt2-7b", "--f", "3"], "both give costs"),
        (["--costs", "gpt2-77b"], "did you mean gpt2-7b"),
        (["--link", "0:5=3"], "ranks go from 0 to 1"),
        (["--out", "best.csv", *BIDIRECTIONAL], "name placements without +bidirectional"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, out, err = run(capsys, "--ranks", "2", "--microbatches", "4", *words)
    assert code in (1, 2)
    assert message in err
    assert not out


@pytest.mark.parametrize("limit", ["34GiB", "36GiB", "34.5GiB,36GiB,36GiB,35GiB"])
def test_what_is_found_within_bytes_fits_and_simulates_as_found(
    limit: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Regression: a limit of bytes was refused, and stages were added up from parts that layers don't divide into."""
    path, model = str(tmp_path / "best.json"), ["--costs", "gpt2-7b", "--link", "1:2=5"]
    given = ["--ranks", "4", "--microbatches", "8", "--memory-limit", limit, *model, "--out", path]
    code, out, _ = run(capsys, *given, "--json")
    assert code == 0
    found = json.loads(out)
    most = [float(each.removesuffix("GiB")) * 2**30 for each in limit.split(",")]
    held = ps.footprint(ps.load(path), read_costs("gpt2-7b", ps.load(path).num_stages), ps.Links({(1, 2): 5.0}))
    assert all(each <= (most * 4)[rank] for rank, each in enumerate(held.totals))
    assert found["found"][0]["peak_bytes"] == held.peak
    assert main(["simulate", path, *model, "--memory-limit", limit, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(found["makespan"])
    less = ",".join(f"{total * 0.999:.0f}B" for total in held.totals)
    assert main(["simulate", path, *model, "--memory-limit", less]) != 0
    capsys.readouterr()


def test_placements_that_do_not_fit_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--ranks", "4", "--microbatches", "8", "--costs", "gpt2-7b", "--memory-limit", "34GiB"]
    _, out, _ = run(capsys, *given)
    assert "nothing on wave+bidirectional: rank 1 holds 35.16 GiB of weights, gradients and optimizer state" in out
    assert "peak counts all that a rank holds" in out
    code, out, _ = run(capsys, "--ranks", "8", "--microbatches", "8", "--costs", "gpt2-7b", "--json")
    assert code == 0
    assert json.loads(out)["left_out"]["wave"] == "gpt2-7b in 32 stages: it has 24 layers; give 1 to 24 stages"


def test_messages_count_within_a_limit_of_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With messages as large as activations, programs that fill what weights leave don't fit."""
    rows = {"f": 1, "i": 1, "w": 1, "activation": 10, "message_bytes": 10, "weight_bytes": 100}
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({name: [value] * 8 for name, value in rows.items()}))
    given = ["--ranks", "2", "--microbatches", "6", "--costs", str(costs), "--json"]
    made = {}
    for limit in ("920B", "960B", "2000B", "120"):
        code, out, _ = run(capsys, *given, "--memory-limit", limit)
        assert code == 0
        made[limit] = json.loads(out)
    assert all(found["peak_bytes"] <= 920 for found in made["920B"]["found"])
    assert made["2000B"]["makespan"] <= made["960B"]["makespan"] <= made["920B"]["makespan"]
    assert made["120"]["makespan"] < made["920B"]["makespan"], "beside 800 of weights and gradients 120 are left"
    code, out, _ = run(capsys, *given, "--memory-limit", "845B")
    assert code == 1
    assert "activations and messages of rank 0 take more than 45 bytes" in json.loads(out)["error"]["message"]


def test_a_limit_may_differ_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--ranks", "2", "--microbatches", "6", *ONE, "--json"]
    _, out, _ = run(capsys, *given, "--memory-limit", "12,4")
    best = ps.parse(json.loads(out)["grid"])
    peaks = ps.simulate(best, ps.Costs.uniform(2)).peak_activations
    assert peaks[0] <= 3
    assert peaks[1] <= 1


def test_shared_ends_fit_too_where_a_file_says_what_each_part_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = {"f": 1, "i": 1, "w": 1, "activation": 10, "message_bytes": 1, "weight_bytes": 100}
    costs, path = tmp_path / "costs.json", tmp_path / "best.json"
    costs.write_text(json.dumps({name: [value] * 10 for name, value in rows.items()}))
    given = ["--ranks", "2", "--microbatches", "6", "--costs", str(costs), "--placement", "shared-ends"]
    given += ["--out", str(path)]
    for limit in (1350, 1500):
        code, out, _ = run(capsys, *given, "--memory-limit", f"{limit}B", "--json")
        assert code == 0
        best = ps.load(path)
        held = ps.footprint(best, fold(read_costs(str(costs), 10), best.num_stages, shared_ends=True))
        assert held.peak == json.loads(out)["found"][0]["peak_bytes"] <= limit


def test_costs_of_a_part_are_given_as_those_of_a_stage_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: search lacked a cost of activations, and like plan a full backward."""
    given = ["--ranks", "2", "--microbatches", "4", "--stages", "2", *ONE, "--json"]
    _, out, _ = run(capsys, *given, "--f", "1", "--i", "2", "--w", "2", "--cost", "b=3", "--no-split")
    costs = ps.Costs([1, 1], [2, 2], [2, 2], b=[3, 3])
    assert json.loads(out)["makespan"] == ps.simulate(ps.build("1f1b", 2, 4), costs).makespan == 20
    times = ["--f", "1", "--i", "2", "--w", "2", "--cost", "b=3", "--no-split"]
    assert main(["plan", *given[:4], *times, "--time", "0.2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 20, "with b=4, as I and W take, it is 25"
    _, out, _ = run(capsys, *given, "--cost", "activation=5", "--cost", "freed_by_input=1", "--memory-limit", "10")
    assert json.loads(out)["found"][0]["peak_activations"] == 10
