"""What the top level shows of itself: every public name in `dir`, and reprs that a terminal can show."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.cost import LinkCondition
from penstock.planning.programs import search_space
from penstock.runtime.mesh.peers import schedule_digest
from penstock.schedule.short_repr import short_repr

pytestmark = pytest.mark.unit

MOST = 2_000


def large_values() -> Iterator[Any]:
    """Public values with much in them."""
    schedule = ps.build("1f1b", 8, 64)
    updating = ps.build("pipedream-2bw", 8, 64, window=16)
    costs = ps.cost.costs_preset("gpt2-7b")
    program = ps.Program(ps.placements.circular(16, 256), 4, ps.Rules(warmup=list(range(16))))
    yield from (schedule, schedule.placement, schedule.graph, updating, updating.updates, program, program.rules)
    yield from (ps.simulate(schedule), ps.simulation.simulate_mesh(ps.build("zb", 4, 12), costs, ps.Mesh(pp=4, dp=2)))
    yield from (ps.Costs.uniform(1000), ps.Costs.uniform(1000, f=1 / 3, i=1 / 3, w=1 / 3), costs)
    yield ps.Links({(rank, rank + 1): rank / 3 for rank in range(1000)})
    yield ps.Links.parse(" ".join(f"{a}:{a + 1}=latency:30ms+loss:1%" for a in range(200)))
    steps = ",".join(f"{second}s/{second}ms" for second in range(300))
    yield LinkCondition.parse(f"latency:steps:{steps}")
    yield ps.Blocking(2, frozenset((a, b) for a in range(40) for b in range(40) if a != b))
    yield ps.footprint(ps.build("amdp", 16, 64, window=16), ps.cost.costs_preset("amdp-gpt", num_stages=16))
    yield next(iter(ps.program.Stepper(program)))
    found = search_space(ps.Costs.uniform(4), 2, 4)
    yield from (found, found.best)
    yield ps.plan(ps.Costs.uniform(4), 4, 16, time_limit=0.05)


def test_a_repr_is_short_however_much_a_value_holds() -> None:
    for value in large_values():
        assert 10 < len(repr(value)) < MOST, type(value)
        assert type(value).__name__ in repr(value)


@pytest.mark.parametrize("name", ps.__all__)
def test_no_public_dataclass_spells_out_all_it_holds(name: str) -> None:
    value = getattr(ps, name)
    if dataclasses.is_dataclass(value) and dataclasses.fields(value):
        assert value.__repr__ is short_repr or value in (ps.Links, ps.Schedule, ps.Timeline)


def test_a_small_value_shows_what_was_given() -> None:
    assert repr(ps.Links({(0, 1): 20.0})) == "Links({(0, 1): 20.0})"
    assert repr(ps.Mesh(pp=4, dp=2)).startswith("Mesh(pp=4, dp=2")
    costs = ps.Costs.uniform(2, f=10, i=20, w=30)
    assert repr(costs).startswith("Costs(f=(10.0, 10.0), i=(20.0, 20.0), w=(30.0, 30.0), b=(50.0, 50.0)")
    zb = ps.build("zb", num_ranks=4, num_microbatches=12)
    assert repr(zb) == "<Schedule zb: 4 ranks, 4 stages, 12 microbatches, 144 ops>"
    assert repr(ps.simulate(zb)).startswith("<Timeline of zb: simulated, frozen, 4 ranks, 144 ops, makespan 39 ms")


def test_the_repr_of_a_pipeline_says_what_it_runs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    schedule, x = ps.build("zb-h1", 2, 4), torch.zeros(8, 4)
    with ps.Pipeline(model, schedule, loss_fn=torch.nn.MSELoss(), optimizer=torch.optim.SGD) as pipe:
        assert repr(pipe) == "<Pipeline zb-h1: 2 ranks, 2 stages, 4 microbatches; frozen dispatch, updates: 0>"
        pipe.step(x, x)
        assert repr(pipe).endswith("updates: 1>")
    assert repr(pipe).endswith("updates: 1>")


def test_ranks_tell_schedules_apart_that_have_one_repr() -> None:
    one, other = ps.build("1f1b", 4, 64), dataclasses.replace(ps.build("gpipe", 4, 64), name="1f1b")
    assert repr(one) == repr(other)
    assert schedule_digest(one) != schedule_digest(other)
    far = dataclasses.replace(one, placement=ps.placements.circular(4, 4))
    assert schedule_digest(far) == schedule_digest(one)


def test_dir_has_every_public_name() -> None:
    assert set(ps.__all__) <= set(dir(ps))
    assert "Pipeline" in dir(ps)


def test_dir_loads_no_torch() -> None:
    code = "import sys, penstock as ps; dir(ps); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_top_level_is_what_planning_proving_drawing_and_running_need() -> None:
    assert len(ps.__all__) <= 40
    assert sorted(ps.__all__) == list(ps.__all__)
    for name in ps.__all__:
        assert getattr(ps, name) is not None
    assert set(ps.__all__) <= set(dir(ps))
    assert {"cost", "planning", "program", "runtime", "simulation"} <= set(dir(ps))


@pytest.mark.parametrize("ending", [".svg", ".html", ".txt", ".json", ".csv"])
def test_a_schedule_saves_itself_by_the_ending(tmp_path: Path, ending: str) -> None:
    schedule, path = ps.build("zb-h1", 2, 4), tmp_path / f"mine{ending}"
    schedule.save(path)
    if ending in (".svg", ".html"):
        assert ("<svg" if ending == ".svg" else "<!doctype html>") in path.read_text().lower()
        with pytest.raises(ps.ScheduleError, match=r"read from \.json, \.txt or \.csv"):
            ps.load(path)
    else:
        assert ps.load(path).order == schedule.order
    with pytest.raises(
        ps.ScheduleError, match=r"mine.png: schedules are written as \.json, \.txt or \.csv, and their"
    ):
        schedule.save(tmp_path / "mine.png")


def test_a_timeline_and_a_plan_save_themselves(tmp_path: Path) -> None:
    found = ps.plan(ps.Costs.uniform(2), 2, 4, time_limit=0.05)
    found.timeline.save(tmp_path / "t.json")
    found.save(tmp_path / "p.json")
    found.save(str(tmp_path / "p.svg"))
    assert "traceEvents" in (tmp_path / "t.json").read_text()
    assert ps.load(tmp_path / "p.json") == found.schedule
    assert (tmp_path / "p.svg").read_text() == ps.draw.to_svg(found.timeline)


def test_a_notebook_shows_pictures_or_says_why_not() -> None:
    schedule = ps.build("1f1b", 2, 4)
    for value in (schedule, ps.simulate(schedule), ps.plan(ps.Costs.uniform(2), 2, 4, time_limit=0.05)):
        assert value._repr_html_().startswith("<svg")
    large = ps.build("1f1b", 8, 512)
    assert len(large._repr_html_()) < MOST
    assert "too many to draw here" in large._repr_html_()
    stuck = dataclasses.replace(schedule, order=tuple(row[::-1] for row in schedule.order))
    assert "cannot be drawn" in stuck._repr_html_()
    assert len(stuck._repr_html_()) < MOST
