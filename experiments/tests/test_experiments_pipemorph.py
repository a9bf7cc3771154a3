"""The paper's figures as experiments: a small sample of each."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import penstock as ps
from experiments.common.results import find

FOLDER = Path(__file__).parents[2] / "experiments" / "pipemorph"
FIGURES = (
    "figure1", "figure3", "figure5", "figure8", "figure14", "figure15", "figure16", "figure17", "figure18",
    "figure19", "figure20", "figure21", "figure22",
)  # fmt: skip
OTHERS = ("memory", "moved", "reaction", "uneven")


@pytest.fixture
def load() -> Any:
    """Imports one of the modules."""
    return lambda name: importlib.import_module(f"experiments.pipemorph.{name}")


@pytest.mark.parametrize("name", [*FIGURES, *OTHERS])
def test_each_says_its_commands_and_how_long_they_take(load: Any, name: str) -> None:
    about = load(name).__doc__
    assert f"python -m experiments.pipemorph.{name}" in about
    assert "second" in about or "minute" in about


@pytest.mark.parametrize("name", [*FIGURES, *OTHERS, "table"])
def test_the_readme_has_each_command(name: str) -> None:
    assert f"{name}.py" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_all_runs_each_command_there_is(load: Any) -> None:
    module = load("all")
    commands = {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    run = {*module.SIMULATED, *module.MEASURED, *module.ALWAYS_MEASURED, "table"}
    assert run.isdisjoint(module.ON_ONE_GPU)
    assert run | {*module.ON_ONE_GPU} == commands - {"all", "measured"}  # which is a process of those that measure


def simulated(load: Any, name: str, **options: Any) -> tuple[ModuleType, list[dict[str, Any]]]:
    """Runs a figure in the simulator; its table and its chart must come out of the rows as they are saved."""
    module = load(name)
    rows = json.loads(json.dumps(list(module.rows(load("backends").Backend(), **options))))
    assert "".join(module.lines(rows))
    assert "<svg" in str(module.chart(rows))
    return module, rows


def test_figure_3_costs_most_in_a_ring(load: Any) -> None:
    module, rows = simulated(load, "figure3")
    grown = {
        (row["kind"], row["place"]): row["simulated_ms"][0]
        / find(rows, kind=row["kind"], place=row["place"], delay_ms=0.0)["simulated_ms"][0]
        for row in rows
        if row["delay_ms"] == 30.0
    }
    assert grown["latency", "DP"] == pytest.approx(module.PAPER["DP"], rel=0.02)  # calibrated on it
    assert grown["queue", "PP"] == pytest.approx(module.PAPER["PP"], rel=0.02)  # and not on this
    assert 1 < grown["latency", "PP"] < grown["queue", "PP"] < grown["queue", "DP"]


def test_figure_5_is_the_paper_s(load: Any) -> None:
    module, rows = simulated(load, "figure5")
    for ms, paper in module.PAPER.items():
        assert find(rows, system="pipemorph-cpu", delay_ms=ms)["simulated_ms"] == [paper]
    assert find(rows, system="dynamic", delay_ms=20.0)["simulated_ms"] == [410]


@pytest.mark.nightly
def test_figure_15_within_the_memory_of_zb(load: Any) -> None:
    module, rows = simulated(load, "figure15", delays=(0.0, 60.0))
    chain = load("setups").CHAIN_8
    undelayed = find(rows, system="zb", delay_ms=0.0)["simulated_ms"][0]
    ours = find(rows, system="ours", delay_ms=60.0)
    assert ours["simulated_ms"][0] <= module.TARGET * undelayed
    assert all(peak <= cap for peak, cap in zip(ours["peaks"], chain.caps, strict=True))
    slower = {name: find(rows, system=name, delay_ms=60.0)["simulated_ms"][0] for name in module.PAPER}
    assert slower["1f1b"] > slower["zb"] >= slower["pipemorph-cpu"] > slower["pipemorph"]


def test_figure_8_absorbs_what_theorem_1_says(load: Any) -> None:
    module, rows = simulated(load, "figure8")
    for slack in (2, 3, 4):
        assert module.absorbed(rows, "alternate", slack) == (slack - 1) * 10


def test_figure_1_tells_blocking_from_dependencies(load: Any) -> None:
    _, rows = simulated(load, "figure1", delays=(0.0, 60.0))
    late = {"system": "zb", "link": "first", "delay_ms": 60.0}
    direct, delegated = (find(rows, **late, transport=each)["simulated_ms"][0] for each in ("direct", "delegated"))
    assert direct > delegated > find(rows, **late | {"delay_ms": 0.0}, transport="direct")["simulated_ms"][0]


@pytest.mark.slow
def test_figure_14_and_16_order_the_systems_as_the_paper_does(load: Any) -> None:
    for name, options, keys in (
        ("figure14", {}, {"delay_ms": 30.0}),
        ("figure16", {"names": ("7B",)}, {"model": "7B", "link": "last", "delay_ms": 60.0}),
    ):
        _, rows = simulated(load, name, **options)
        times = [
            find(rows, **keys, system=system)["simulated_ms"][0]
            for system in ("1f1b", "zb", "pipemorph-cpu", "pipemorph")
        ]
        assert times == sorted(times, reverse=True)


@pytest.mark.slow
def test_figure_17_is_within_three_per_cent_of_the_best(load: Any) -> None:
    module, rows = simulated(load, "figure17", names=("first", "three skipping"), search=0.5)
    for name in ("first", "three skipping"):
        best, ours = find(rows, links=name, system="best"), find(rows, links=name, system="ours")
        assert best["bound_ms"] <= best["simulated_ms"][0] <= ours["simulated_ms"][0]
        assert ours["simulated_ms"][0] <= (1 + module.TARGET) * best["simulated_ms"][0]


@pytest.mark.slow
def test_memory_s_curve_falls_with_memory(load: Any) -> None:
    _, rows = simulated(load, "memory", memories=(15, 8), search=0.1)
    for way in ("dynamic", "+4 in host memory"):
        assert find(rows, way=way, memory=15)["simulated_ms"] <= find(rows, way=way, memory=8)["simulated_ms"]
    assert find(rows, way="frozen", memory=8)["simulated_ms"] > find(rows, way="dynamic", memory=8)["simulated_ms"]


@pytest.mark.slow
def test_reaction_takes_at_most_five_iterations(load: Any) -> None:
    module, rows = simulated(load, "reaction")
    assert [module.before(row) <= module.TARGET for row in rows] == [True] * len(module.CASES)


def test_figure_20_s_events_need_no_steps(load: Any) -> None:
    _, rows = simulated(load, "figure20", sizes=((3, 6),), profiles=2, search=0.2)
    assert all(row["over_best"] >= 0 for row in rows)
    assert {row["way"] for row in rows} == {
        "2 steps",
        "5 steps",
        "10 steps",
        "20 steps",
        "30 steps",
        "events",
        "greedy",
    }


def test_uneven_microbatches_all_weigh_the_same(load: Any) -> None:
    module, rows = simulated(load, "uneven", spreads=(0.0, 0.5), draws=1)
    assert sum(module.drawn(0.5, 0)) == pytest.approx(module.MODEL.num_microbatches)
    assert len(rows) == 8


def test_traces_have_the_paper_s_quantiles(load: Any) -> None:
    traces, chain = load("traces"), load("setups").CHAIN_4
    found = traces.summary(traces.trace_of("bursty", chain.links, 10.0, 1), 600e3, chain.links)
    assert (found["median"], found["mean"], found["p99"]) == pytest.approx((13.0, 22.3, 79.3), rel=0.05)


@pytest.mark.slow
def test_throughput_through_a_trace_with_clairvoyant(load: Any) -> None:
    throughput, chain = load("throughput"), load("setups").CHAIN_4
    rows = list(throughput.rows(load("backends").Backend(), chain, ("A",), 1 / 15, every=6))
    assert "over clairvoyant" in "".join(throughput.lines(rows, {}))
    assert "<svg" in str(throughput.chart(rows, "A", {}))
    ours = find(rows, system="ours")
    assert ours["peak_over_cap"] <= 1
    assert ours["over_clairvoyant"] > -0.05


@pytest.mark.slow
def test_measured_on_threads_through_the_closed_loop(load: Any, tmp_path: Path) -> None:
    backends, loops, systems = load("backends"), load("loops"), load("systems")
    model = replace(load("setups").CHAIN_4, costs=ps.Costs.uniform(4, 1, 1, 1), num_microbatches=8)
    backend = backends.Backend("threads", stretch=2.0, steps=1, jobs=1)
    delays = {model.last: 3.0}
    cases = [
        backends.Case({"system": name}, systems.setting(name, model, delays), load("setups").late(delays))
        for name in ("zb", "pipemorph-cpu", "ours")
    ]
    rows = list(backend.run(cases))
    assert [len(row["measured_ms"]) for row in rows] == [1, 1, 1]
    conditions = load("setups").late(delays)
    rows += loops.run(backend, [loops.loop("ours", model, {"system": "loop"}, conditions, 200.0)])
    assert rows[-1]["peak_over_cap"] <= 1
    load("command").save(tmp_path, "sample", backend, rows, 1.0)
    assert "median error" in "".join(load("table").lines(load("table").measured_files(tmp_path)))


@pytest.mark.slow
def test_figure_19_moves_a_late_link_under_pp_and_absorbs_it_there(load: Any) -> None:
    module, rows = simulated(load, "figure19", delays=(0.0, 30.0))
    ms = {(row["kind"], row["system"]): row["simulated_ms"][0] for row in rows if row["delay_ms"] == 30.0}
    undelayed = find(rows, system="zb", kind="latency", delay_ms=0.0)["simulated_ms"][0]
    assert ms["latency", "zb"] / undelayed == pytest.approx(module.PAPER["zb"], rel=0.02)  # calibrated on it
    for kind in load("meshes").KINDS:
        assert ms[kind, "zb"] >= module.TARGETS["re-ranked"] * ms[kind, "falcon"]
        assert ms[kind, "falcon"] > ms[kind, "ours, under PP"] > ms[kind, "ours"] == undelayed
        assert find(rows, system="ours", kind=kind, delay_ms=30.0)["use"] == "unused"
        under_pp = find(rows, system="ours, under PP", kind=kind, delay_ms=30.0)
        assert under_pp["use"].startswith("PP link")
        assert all(peak <= cap * (1 + 1e-9) for peak, cap in zip(under_pp["peaks"], under_pp["caps"], strict=True))
    assert ms["queue", "falcon"] >= module.TARGETS["absorbed"] * ms["queue", "pipemorph"]


@pytest.mark.slow
def test_figure_19_is_measured_on_emulated_devices(load: Any) -> None:
    module, meshes = load("figure19"), load("meshes")
    backend = replace(load("backends").Backend("threads"), stretch=0.25, steps=1, jobs=1)
    mesh, configuration = module.systems(10.0, "queue")["falcon"]
    case = meshes.MeshCase({}, module.COSTS, configuration, mesh, module.RING, module.LINK, 10.0, "queue")
    row = meshes.mesh_row(backend, case)
    busy = sum(12 * ms for ms in (module.COSTS.f[1], module.COSTS.i[1], module.COSTS.w[1]))
    assert row["measured_ms"][0] > busy, "no run is shorter than a rank's ops"
    assert row["use"] == "PP link 2:3 of replica 0"
