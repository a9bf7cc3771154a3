"""`penstock plan`: one JSON object, files, and misuse named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.formats.costs import read_costs
from penstock.planning import planner
from penstock.planning.options import PlanRequest

PLAN = ["plan", "--ranks", "4", "--microbatches", "12", "--f", "10", "--i", "10", "--w", "10", "--link", "0:1=20"]


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["makespan"], found["lower_bound"], found["gap"]) == (410.0, 410.0, 0.0)
    assert found["certificate"] == {
        "placement": [[0, 1, 2, 3]],
        "shared": [],
        "backward": "any",  # as B takes what I and W take together
        "microbatches": "in turn",
        "recompute": "any",  # as no memory is short
        "offload": "none",
        "pairs": "none",
        "order": "as numbered",
        "channel": "buffered",
    }


def test_a_plan_for_a_channel_is_written_with_its_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.csv"
    assert main([*PLAN, "--channels", "nccl-edge", "--time", "3", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["certificate"]["channel"] == "nccl-edge"
    placed = ps.load(out)
    ps.check(placed, channels="nccl-edge")
    costs, links = ps.Costs.uniform(4, f=10, i=10, w=10), ps.Links({(0, 1): 20.0})
    assert ps.simulate(placed, costs, links=links, channels="nccl-edge").makespan == found["makespan"]
    assert main([*PLAN, "--channels", "nccl-edge", "--time", "0.5"]) == 0
    said = capsys.readouterr().out
    assert "messages over nccl-edge" in said
    assert "SEND" not in said, "the grid shows ops alone"


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ("--ranks 2 --cost message_bytes=60e6 --link 0:1=bandwidth:1GB/s", 12 * 60 + 100),
        ("--ranks 2 --cost message_bytes=60e6 --link 0:1=bandwidth:1GB/s --objective span", 12 * 60 + 100),
        ("--ranks 2 --cost message_bytes=60e6 --link 0:1=bandwidth:1GB/s --dispatch hinted", 12 * 60 + 100),
        ("--ranks 3 --cost message_bytes=[60e6,1e6,0] --link 1:2=bandwidth:1GB/s", 12 * 30),
        ("--ranks 2 --cost message_bytes=60e6 --cost lengths=[1,3,1,3] --link 0:1=bandwidth:1GB/s", 4 * 60),
        ("--ranks 2 --link 0:1=latency:5ms+occupancy:60ms", 12 * 60 + 100),
    ],
)
def test_messages_wait_for_one_another_over_a_bandwidth(
    options: str, least: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a bandwidth was planned, and timed, as the delay of the largest message."""
    out, given = tmp_path / "plan.json", f"--f 10 --i 10 --w 10 {options}"
    count = 4 if "lengths" in options else 12
    assert main([*f"plan --microbatches {count} {given} --time 1 --out {out} --json".split()]) == 0
    found = json.loads(capsys.readouterr().out)
    given = re.sub("--(ranks|objective) [a-z0-9]+", "", given)
    assert main(["simulate", str(out), *given.split(), "--json"]) == 0
    timed = json.loads(capsys.readouterr().out)
    assert found["makespan"] == timed["makespan"] >= least
    assert found["value"] == timed["span" if "span" in options else "makespan"]
    assert 0 < found["lower_bound"] <= found["value"] == pytest.approx(found["lower_bound"] * (1 + found["gap"]))


@pytest.mark.parametrize("verb", ["simulate 1f1b", "plan", "simulate 1f1b gpipe"])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_lengths_are_one_per_microbatch(
    verb: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: those that were missing counted as the mean, and further ones were left out without a word."""
    (tmp_path / "costs.json").write_text(json.dumps({"f": 1, "i": 1, "w": 1, "uneven": [2.0] * count}))
    given = [*verb.split(), "--ranks", "2", "--microbatches", "8"]
    for option, named in (
        (f"--cost=lengths={[7] * count}", "--cost lengths"),
        (f"--costs={tmp_path}/costs.json", f"uneven of --costs {tmp_path}/costs.json"),
    ):
        assert main([*given, option]) == 2
        assert f"{named} has {count} entr" in (said := capsys.readouterr().err)
        assert "give one per microbatch: 8" in said


def test_messages_that_wait_count_within_a_limit_of_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"f": 5, "i": 5, "w": 5, "activation": 10, "message_bytes": 40e6, "weight_bytes": 1e6}
    (tmp_path / "costs.json").write_text(json.dumps(rows))
    given = f"plan --ranks 2 --microbatches 12 --costs {tmp_path}/costs.json --link 0:1=bandwidth:1GB/s --time 1"
    assert main([*given.split(), "--memory-limit", "1GB"]) == 0
    assert main([*given.split(), "--memory-limit", "420MB"]) == 1
    assert "messages included, which is" in capsys.readouterr().err


EXCHANGE = ps.NewOp("EXCHANGE", stage=1, after={("F", 1): 2}, before={("B", 1): 2}, time=5)


def test_a_schedule_file_as_the_placement_brings_its_own_ops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, costs = tmp_path / "own.json", tmp_path / "costs.json"
    program = ps.Program(ps.placements.one_to_one(2), 4, ops=[EXCHANGE])
    ps.save(program.build(), own)
    costs.write_text(json.dumps({"f": 10, "i": 10, "w": 10, "other": {"EXCHANGE": 5}}))
    words = ["plan", "--ranks", "2", "--microbatches", "4", "--costs", str(costs), "--time", "1"]
    assert main([*words, "--placement", str(own), "--out", str(tmp_path / "plan.json"), "--json"]) == 0
    found, planned = json.loads(capsys.readouterr().out), ps.load(tmp_path / "plan.json")
    assert [op.kind for op in planned.order[1]].count("EXCHANGE") == 2
    assert found["makespan"] == ps.simulate(planned, read_costs(str(costs), 2)).makespan
    assert main(["plan", "--placement", str(own), "--costs", str(costs), "--time", "1", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert (alone["num_ranks"], alone["num_microbatches"]) == (2, 4), "a file says both numbers"
    assert main(["plan", "--placement", str(own), "--costs", str(costs), "--time", "1"]) == 0
    said = capsys.readouterr().out
    assert "untimed" not in said
    covers = next(line for line in said.splitlines() if line.startswith("covers"))
    assert "ops of your own (EXCHANGE)" in covers
    assert "branch" not in covers, "its stages are a chain"
    assert main(["plan", "--placement", "v-shape", "--ranks", "2"]) == 2
    assert "give --ranks and --microbatches" in capsys.readouterr().err
    assert main(words) == 2
    assert "the costs have times of EXCHANGE, and the plan would have no such ops" in capsys.readouterr().err
    for more, said in (
        (["--placement", str(own), "--placement", "all"], "a search tries placements by name"),
        (["--placement", str(own), "--stages", "4"], "says how many stages there are"),
        (["--placement", str(own), "--ranks", "4"], "places its stages on 2; give as many"),
        (["--placement", str(own), "--microbatches", "8"], "own.json has ops for 4; give as many"),
    ):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err


def test_bug_a_plan_said_nothing_of_own_ops_without_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.json"
    ps.save(ps.Program(ps.placements.one_to_one(2), 4, ops=[EXCHANGE]).build(), own)
    words = ["plan", "--placement", str(own), "--time", "0.2"]
    assert main(words) == 0
    assert "untimed      EXCHANGE takes 0 ms; give the time, as --cost EXCHANGE=2.5\n" in capsys.readouterr().out
    for more, untimed in (([], ["EXCHANGE"]), (["--cost", "EXCHANGE=5"], [])):
        assert main([*words, *more, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["untimed"] == untimed


def test_text_shows_grid_and_gap(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "2", "--microbatches", "3", "--placement", "v-shape", "--time", "0.2"]) == 0
    said = capsys.readouterr().out
    assert "rank 1 |" in said
    assert "gap" in said
    assert (
        "covers       placement v-shape, each backward split or whole, each forward run again or not, no offload"
        in said
    )


def test_what_waits_in_host_memory_is_asked_for_by_its_amount(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tmp_path / "costs.json"
    rows = {"f": [10] * 4, "i": [10] * 4, "w": [10] * 4, "other": {"OFFLOAD": 5, "RELOAD": 5}}
    costs.write_text(json.dumps(rows))
    given = [*f"plan --ranks 4 --microbatches 8 --costs {costs} --link 2:3=40 --time 0.5".split()]
    for amount in ("any", "4", "4,3,2,1"):
        assert main([*given, "--max-in-flight", "3", "--offload", amount, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["certificate"]["offload"] == "any"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--max-in-flight", "0.5"], 1, "no schedule fits"),
        (["--time", "0"], 2, "time_limit is 0"),
        (["--placement", "w"], 2, "no placement is named 'w': choose among one-to-one"),
        (["--placement", "all", "--max-in-flight", "8"], 2, "a search of placements takes --memory-limit, such as"),
        (["--placement", "wave", "--stages", "6"], 2, "wave over 4 ranks has a multiple of 8 stages, and 6"),
        (["--stages", "8"], 2, "one-to-one over 4 ranks has 4 stages, and 8 are given"),
        (["--f", "1,2"], 2, "--f has 2 entries"),
        (["--cost", "GATHER=1,2"], 2, "--cost GATHER has 2 entries"),
        (["--cost", "F=30"], 2, "ms of F, I, W and B are given as f, i, w and b"),
        (["--placement", "all", "--cost", "GATHER=3"], 2, "--cost GATHER is for a plan with one placement"),
        (["--objective", "cost"], 2, "objective is 'cost'"),
    ],
    ids=str,
)
def test_misuse_is_named(options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *options]) == code
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_limit_with_a_unit_counts_all_that_a_rank_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    given = ["plan", "--costs", "gpt2-7b", "--ranks", "4", "--microbatches", "12", "--link", "1:2=20", "--time", "1"]
    costs, links = ps.cost.costs_preset("gpt2-7b"), ps.Links({(1, 2): 20.0})
    assert main([*given, "--memory-limit", "35GiB", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    held = ps.footprint(ps.load(out), costs, links)
    assert held.peak <= 35 * 2**30
    room = ps.simulation.room_for_activations(ps.load(out).placement, costs, 35 * 2**30)
    assert all(rank.activations <= each for rank, each in zip(held.ranks, room, strict=True))
    assert found["lower_bound"] <= found["makespan"]


def test_messages_count_too_and_the_bound_stays_that_of_activations_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With messages as large as activations the first plan does not fit, and the search begins again with less."""
    path, out = tmp_path / "costs.json", tmp_path / "plan.json"
    rows = {"f": 1, "i": 1, "w": 1, "activation": 10, "message_bytes": 10, "weight_bytes": 100}
    path.write_text(json.dumps({name: [value] * 4 for name, value in rows.items()}))
    costs = read_costs(str(path), 4)
    given = ["plan", "--costs", str(path), "--ranks", "4", "--microbatches", "8", "--time", "1", "--out", str(out)]
    made = []
    for limit in ("250B", "1000B", "50"):
        assert main([*given, "--memory-limit", limit, "--json"]) == 0
        made.append((json.loads(capsys.readouterr().out), ps.load(out)))
    (tight, plan), (wide, unlimited), (alone, _) = made
    assert ps.footprint(plan, costs).peak <= 250 < ps.footprint(unlimited, costs).peak
    assert tight["lower_bound"] == alone["lower_bound"] <= wide["makespan"] <= tight["makespan"]
    for limit in ("209B", "211B", "212B"):
        assert main([*given, "--memory-limit", limit]) == 1
        assert "no schedule fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "limit", "words"),
    [
        ("plan --ranks 4 --microbatches 12", "35GiB", "these costs do not say what weights take"),
        ("plan --ranks 4 --microbatches 12", "35GiB,7", "7 has no unit and 35GiB has one"),
        ("plan --placement all --ranks 2 --microbatches 2", "3GiB", "do not say what weights take"),
        ("simulate 1f1b --costs gpt2-7b --ranks 4 --microbatches 8", "30GiB", "which is 3.951 GiB more"),
        ("simulate 1f1b --costs gpt2-7b --ranks 4 --microbatches 8", "9GiB,9GiB", "2 entries"),
        ("simulate 1f1b --ranks 4 --microbatches 8", "3", "own order needs 4"),
        ("simulate 1f1b --ranks 4 --microbatches 8", "3GiB", "do not say what weights take"),
        (
            "simulate zb-h1 --costs gpt2-7b --ranks 4 --microbatches 12 --dispatch hinted", "34.88GiB",
            "MiB more than --memory-limit",
        ),
    ],
)  # fmt: skip
def test_limits_that_are_refused(verb: str, limit: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--memory-limit", limit]) != 0
    assert words in capsys.readouterr().err


def test_what_is_held_above_the_limit_is_that_of_the_capped_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: messages were added to activations of a run with another cap, so that a rank could hold more."""
    given = ["simulate", "1f1b", "--costs", "gpt2-7b", "--ranks", "4", "--microbatches", "12", "--link", "1:2=40"]
    schedule, costs, links = ps.build("1f1b", 4, 12), ps.cost.costs_preset("gpt2-7b"), ps.Links({(1, 2): 40.0})
    room = ps.simulation.room_for_activations(schedule.placement, costs, 44 * 2**30)
    held = ps.footprint(schedule, costs, links, dispatch="hinted", memory_limit=room)
    assert held.peak > ps.footprint(schedule, costs, links, dispatch="hinted").peak
    for limit, code in ((44 * 2**30, 0), (int(held.peak) + 1, 0), (int(held.peak) - 1, 1)):
        assert main([*given, "--dispatch", "hinted", "--memory-limit", f"{limit}B", "--json"]) == code
    assert "bytes more than --memory-limit" in capsys.readouterr().out


@pytest.mark.parametrize("name", ps.placements.NAMES)
def test_plan_and_search_read_the_same_names_of_placements(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    counts = ["--ranks", "2", "--microbatches", "2", "--placement", name, "--json"]
    assert main(["plan", *counts, "--time", "0.1"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["plan", *counts, "--placement", name, "--stages", "8"]) == 0
    searched = ps.parse(json.loads(capsys.readouterr().out)["grid"])
    assert [tuple(row) for row in planned["certificate"]["placement"]] == list(searched.placement.pipelines)
    costs = ps.Costs.uniform(searched.num_stages)
    assert ps.plan(costs, 2, 2, placement=name, time_limit=0.1).schedule.placement == searched.placement


def test_all_searches_under_a_limit_of_bytes_take_no_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search again with less room had a fifth of the time limit, however much of it was left."""
    rows = {"activation": [10.0] * 2, "message_bytes": [9.0] * 2, "weight_bytes": [10.0] * 2}
    costs = ps.Costs(**{row: [1.0] * 2 for row in "fiw"}, **rows)
    given: list[float] = []
    original = planner.planned

    def planned(request: PlanRequest) -> ps.Plan:
        if request.total_limit is None:
            given.append(request.time_limit)
        return original(request)

    monkeypatch.setattr(planner, "planned", planned)
    ps.plan(costs, 2, 6, total_limit=70.0, time_limit=0.5)
    assert len(given) > 1
    assert sum(given) <= 0.5


def test_a_limit_of_bytes_is_the_same_from_python() -> None:
    rows = ("f", "i", "w", "activation", "message_bytes", "weight_bytes")
    costs = ps.Costs(**{row: [1.0] * 2 for row in rows[:3]}, **{row: [10.0] * 2 for row in rows[3:]})
    for limit in (70.0, [90.0, 60.0]):
        found = ps.plan(costs, 2, 6, total_limit=limit, time_limit=0.5)
        each = limit if isinstance(limit, list) else [limit] * 2
        totals = ps.footprint(found.schedule, costs).totals
        assert all(held <= most for held, most in zip(totals, each, strict=True))
        assert found.lower_bound <= found.value
    for changes, words in (
        ({"total_limit": 35}, "messages of|no schedule fits"),
        ({"total_limit": 70, "memory_limit": 4}, "give one of them"),
        ({"total_limit": 70, "max_in_flight": 4}, "give one of them"),
        ({"total_limit": [70]}, "total_limit has 1 entries"),
        ({"total_limit": float("nan")}, "give a number above 0"),
    ):
        with pytest.raises(ps.ScheduleError, match=words):
            ps.plan(costs, 2, 6, time_limit=0.2, **changes)
    with pytest.raises(ps.CostError, match="do not say what weights take"):
        ps.plan(ps.Costs.uniform(2), 2, 6, total_limit=70)
    with pytest.raises(ps.CostError, match="rank 0 holds 20 bytes of weights"):
        ps.plan(costs, 2, 6, total_limit=15)
