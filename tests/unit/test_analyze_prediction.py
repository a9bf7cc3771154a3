"""`penstock analyze --try`: a step of another schedule, cut, link or channel; its error bar; refusals."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import penstock as ps
from penstock.analyze import RunAnalysis, analyze_trace, predict
from penstock.cli import main
from penstock.formats.traces import TraceError, read_trace
from penstock.schedule import Op, Schedule
from penstock.simulation import Timeline

pytestmark = pytest.mark.unit
COSTS = ps.Costs(f=[20, 30, 25, 35], i=[22, 28, 26, 30], w=[18, 20, 15, 25])


def write_trace(path: Path, steps: Sequence[Timeline], between: float = 0.0) -> Path:
    """A table of ops. Each op may begin later than the rank's row says, by `between` ms an op that its rank ran."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["op", "stage", "microbatch", "rank", "step", "start", "end"])
        for step, timeline in enumerate(steps):
            for timed in timeline.ops:
                op = timed.op
                writer.writerow(
                    [op.kind, op.stage, op.microbatch, timed.rank, step, timed.start + between, timed.end]
                )
    return path


def analysis(tmp_path: Path, *steps: Timeline, between: float = 0.0) -> RunAnalysis:
    return analyze_trace(read_trace([write_trace(tmp_path / "run.csv", steps, between)]))


def run(name: str, costs: ps.Costs = COSTS, links: ps.Links | None = None, **options: Any) -> Timeline:
    return ps.simulate(ps.build(name, 4, 8), costs, links, **options)


def in_torch(costs: ps.Costs) -> ps.Costs:
    """As torch runs them: the first stage's I does nothing."""
    return replace(costs, i=(0.0, *costs.i[1:]), w=(costs.b[0], *costs.w[1:]))


@pytest.mark.parametrize("name", ["1f1b", "zb", "v-half"])
def test_another_schedule_takes_what_its_simulation_takes(tmp_path: Path, name: str) -> None:
    found = analysis(tmp_path, run("zb-h1"))
    if name == "v-half":  # two stages a rank: each recorded stage in two parts
        parts = [[ms / 2 for ms in row for _ in range(2)] for row in (COSTS.f, COSTS.i, COSTS.w)]
        true = run(name, ps.Costs(*parts)).makespan
    else:
        true = run(name).makespan
    said = predict(found, name)
    assert said.time == pytest.approx(true)
    assert said.speedup == pytest.approx(run("zb-h1").makespan / true)


def test_stages_of_a_rank_are_put_together(tmp_path: Path) -> None:
    """Eight stages, recorded in a loop over four ranks, are put together two by two."""
    costs = ps.Costs(*[[10.0 + stage for stage in range(8)]] * 3)
    pairs = ps.Costs(*[[21.0 + 4 * stage for stage in range(4)]] * 3)
    found = analysis(tmp_path, run("interleaved-1f1b", costs))
    assert predict(found, "1f1b").time == pytest.approx(run("1f1b", pairs).makespan)


def test_whole_backwards_beside_split_ones_free_their_activations(tmp_path: Path) -> None:
    whole = ps.build("1f1b", 2, 4)
    rows = [
        [Op(kind, *op[1:3]) for op in row for kind in ("IW" if op.kind == "B" and op.microbatch == 3 else op.kind)]
        for row in whole.order
    ]
    mixed = ps.simulate(Schedule.of("mixed", whole.placement, rows, 4), ps.Costs.uniform(2, f=10, i=10, w=10))
    fit = analysis(tmp_path, mixed).fit
    assert fit is not None
    assert fit.in_flight == 2


@pytest.mark.parametrize("name", ["zb", "hanayo", "dualpipe-v"])
def test_regression_schedules_of_our_own_were_called_recorded(tmp_path: Path, name: str) -> None:
    found = analysis(tmp_path, run(name, ps.Costs.uniform(ps.build(name, 4, 8).num_stages, f=10, i=10, w=10)))
    assert found.to_json()["schedule"] == name
    assert predict(found).what == name


@pytest.mark.filterwarnings("error")
def test_regression_a_run_of_one_rank_warned_of_a_median_of_nothing(tmp_path: Path) -> None:
    one = ps.simulate(ps.build("1f1b", 1, 4), ps.Costs.uniform(1, f=10, i=10, w=10))
    assert analysis(tmp_path, one).metrics.measured == pytest.approx(120.0)


def test_links_are_those_of_the_trace_but_for_those_given(tmp_path: Path) -> None:
    late = ps.Links({(1, 2): 12.0}, default=1.0)
    found = analysis(tmp_path, run("1f1b", links=late))
    assert predict(found).time == pytest.approx(run("1f1b", links=late).makespan)
    other = ps.Links({(1, 2): 0.0, (2, 3): 40.0}, default=1.0)
    said = predict(found, links=ps.Links({(1, 2): 0.0, (2, 3): 40.0}))
    assert said.time == pytest.approx(run("1f1b", links=other).makespan)


def test_regression_messages_that_nobody_waited_for_made_a_late_link(tmp_path: Path) -> None:
    """In looped BFS all messages from the last rank to the first lie there for long: it was said to be 63 ms late."""
    links, costs = ps.Links(default=1.0), ps.Costs.uniform(8, f=10, i=10, w=10)
    found = analysis(tmp_path, run("looped-bfs", costs, links))
    assert found.fit is not None
    assert all(found.fit.links.delay(*link) == pytest.approx(1.0) for link in found.fit.links.conditions)
    said = predict(found, "interleaved-1f1b")
    assert said.time == pytest.approx(run("interleaved-1f1b", costs, links).makespan)
    assert "links whose messages nobody waited for (0 to 3, 3 to 0) are like others" in said.assumed
    assert not any("nobody waited" in each for each in predict(analysis(tmp_path, run("1f1b", COSTS, links))).assumed)


def cut_costs(cut: Sequence[int]) -> ps.Costs:
    """Of equal layers, an embedding in the first stage and a loss in the last."""
    f, i, w = ([ms * layers for layers in cut] for ms in (6.0, 5.0, 4.0))
    f[0], f[-1], i[-1] = f[0] + 3, f[-1] + 5, i[-1] + 5
    return ps.Costs(f, i, w)


@pytest.mark.parametrize(("name", "cut"), [("zb-h1", (5, 3, 3, 5)), ("interleaved-1f1b", (3, 2, 2, 2, 2, 2, 2, 1))])
def test_another_cut_moves_layers_and_leaves_the_embedding_and_the_loss(
    tmp_path: Path, name: str, cut: Sequence[int]
) -> None:
    layers = (4, 5, 5, 2)
    found = analysis(tmp_path, run("zb-h1", cut_costs(layers)))
    assert predict(found, name, layers=layers, cut=cut).time == pytest.approx(run(name, cut_costs(cut)).makespan)


def test_on_channels_the_first_stages_input_gradient_does_nothing(tmp_path: Path) -> None:
    links = ps.Links({(2, 3): 25.0})
    for name, costs in (("1f1b", COSTS), ("zb-h1", in_torch(COSTS))):
        found = analysis(tmp_path, run(name, costs, links, channels="gloo"))
        true = run("zb-h1", in_torch(COSTS), links, channels="gloo").makespan
        said = predict(found, "zb-h1", channels="gloo")
        if name == "1f1b":  # the halves of a backward are not known
            assert said.bar is not None
            assert said.bar[0] < true < said.bar[1]
            assert any("40% to 60%" in each for each in said.assumed)
        else:
            assert said.time == pytest.approx(true, rel=1e-3)


def with_late_receives(schedule: Schedule) -> Schedule:
    """Messages as a plain lowering places them: each receive just before its op."""
    rows = []
    for rank, row in enumerate(schedule.order):
        placed: list[Op] = []
        for op in row:
            way = -1 if op.kind in "BI" else 1
            ends = op.stage - way, op.stage + way
            travels = [
                op.kind != "W" and 0 <= other < schedule.num_stages and schedule.rank_of(other, 0) != rank
                for other in ends
            ]
            letter = "F" if way == 1 else "B"
            placed += [Op(f"RECV_{letter}", op.stage, op.microbatch)] * travels[0]
            placed.append(op)
            placed += [Op(f"SEND_{letter}", op.stage, op.microbatch)] * travels[1]
        rows.append(tuple(placed))
    return replace(schedule, order=tuple(rows))


def test_receives_that_were_posted_late_count_neither_as_late_links_nor_as_time_between_ops(tmp_path: Path) -> None:
    """Regression: a trace of torch's lowering over a link of 60 ms; zb of it was said to take 7% too long."""
    links, costs = ps.Links({(2, 3): 60.0}, default=0.5), in_torch(COSTS)
    lowered = with_late_receives(ps.build("zb", 4, 8))
    found = analysis(tmp_path, ps.simulate(lowered, costs, links, channels="gloo"))
    true = run("zb", costs, links, channels="gloo").makespan
    assert found.metrics.measured > 1.1 * true
    assert predict(found, "zb", channels="gloo").time == pytest.approx(true, rel=5e-3)
    healthy = run("zb", costs, ps.Links(default=0.5), channels="gloo").makespan
    said = predict(found, "zb", links=ps.Links({(2, 3): 0.5}), channels="gloo")
    assert said.time == pytest.approx(healthy, rel=5e-3)


@pytest.mark.parametrize(("pair", "ms"), [((0, 1), 110.0), ((2, 3), 91.0), ((1, 2), 25.0)])
@pytest.mark.parametrize("way", ["late", "placed"])
@pytest.mark.parametrize("name", ["1f1b", "zb", "zb-v"])
def test_a_late_link_is_as_late_as_it_is_wherever_receives_stand(
    tmp_path: Path, name: str, way: str, pair: tuple[int, int], ms: float
) -> None:
    """Regression: in 1f1b by torch over a link of 110 ms the one message that was waited for took 198 ms."""
    schedule = ps.build(name, 4, 8)
    times = [22.0, 45.0, 36.0, 47.0] * (schedule.num_stages // 4)
    placed = with_late_receives(schedule) if way == "late" else schedule
    costs = in_torch(ps.Costs(times, times, times))
    fit = analysis(tmp_path, ps.simulate(placed, costs, ps.Links({pair: ms}, default=0.5), channels="gloo")).fit
    assert fit is not None
    for link in (pair, pair[::-1]):
        assert fit.links.delay(*link) == pytest.approx(ms, abs=1.0)
    assert all(fit.links.delay(*link) <= 1.0 for link in fit.links.conditions if set(link) != set(pair))


def test_a_rank_that_begins_its_step_late_has_no_late_link(tmp_path: Path) -> None:
    """Regression: in TorchTitan a rank began 169 ms after the first one, and its link was said to be as late."""
    costs = ps.Costs.uniform(4, f=40, b=80)
    begins_late = ps.Links({(0, 1): "latency:steps:0s/150ms,50ms/0.5ms", (1, 0): 0.5}, default=0.5)
    fit = analysis(tmp_path, run("1f1b", costs, begins_late)).fit
    assert fit is not None
    assert fit.links.delay(0, 1) == pytest.approx(0.5, abs=0.1)


def test_time_between_ops_is_in_the_prediction(tmp_path: Path) -> None:
    slower = ps.Costs(*[[ms + 0.5 for ms in row] for row in (COSTS.f, COSTS.i, COSTS.w)])
    found = analysis(tmp_path, run("zb-h1", slower), between=0.5)
    assert found.fit is not None
    assert found.fit.between == pytest.approx({"F": 0.5, "I": 0.5, "W": 0.5})
    assert predict(found, "zb").time == pytest.approx(run("zb", slower).makespan, rel=2e-3)


def uneven(seed: int, spread: float) -> ps.Costs:
    random = Random(seed)
    factors = [[[random.uniform(1 - spread, 1 + spread) for _ in range(8)] for _ in range(4)] for _ in "FIW"]
    rows = [
        [[ms * each for each in by] for ms, by in zip(row, of, strict=True)]
        for row, of in zip((COSTS.f, COSTS.i, COSTS.w), factors, strict=True)
    ]
    return ps.Costs.by_microbatch(**dict(zip("fiw", rows, strict=True)))


def test_the_error_bar_is_as_wide_as_steps_differ(tmp_path: Path) -> None:
    widths = []
    for spread in (0.0, 0.3):
        steps = [run("zb-h1", uneven(seed, spread)) for seed in range(6)]
        said = predict(analysis(tmp_path, *steps), "zb")
        assert said.bar is not None
        low, high = said.bar
        assert low < said.time < high
        others = [run("zb", uneven(seed, spread)).makespan for seed in range(20, 40)]
        assert sum(low <= ms <= high for ms in others) >= 16
        widths.append((high - low) / said.time)
    assert widths[0] < 0.05 < widths[1]


@pytest.mark.parametrize("late", [0.0, 4.0])
def test_the_table_and_try_say_the_same(tmp_path: Path, late: float) -> None:
    """As of one run, zb of which was 1.11 times as fast in the table and 1.40 times by --try."""
    steps = [run("1f1b", uneven(seed, 0.2), ps.Links({(1, 2): 3.0})) for seed in range(4)]
    for timeline in steps:  # which starts late: between its ops more passes than usual
        object.__setattr__(timeline, "ops", tuple(_late(timeline.ops, late)))
    found = analyze_trace(read_trace([write_trace(tmp_path / "run.csv", steps, 0.5)]), layers=(4, 5, 5, 2))
    measured = found.metrics.measured
    assert (predict(found).time, predict(found).speedup) == (pytest.approx(measured), pytest.approx(1.0))
    by_kind = {kind: [each for each in found.what_ifs if each.kind == kind] for kind in ("schedule", "cut")}
    assert {each.what.split()[0] for each in by_kind["schedule"]} == {"zb-h1", "zb-v", "v-half"}
    for each in by_kind["schedule"]:
        tried = predict(found, each.what.split()[0])
        assert (each.time, each.speedup, each.bar) == (tried.time, tried.speedup, tried.bar)
    (cut,) = by_kind["cut"]
    layers = [int(part) for part in cut.what.removeprefix("layers ").partition(" to ")[0].split(",")]
    assert predict(found, layers=(4, 5, 5, 2), cut=layers).time == cut.time


def test_an_even_cut_was_not_tried_where_steps_ran_several_orders(tmp_path: Path) -> None:
    steps = [run(name, uneven(1, 0.0)) for name in ("1f1b", "gpipe", "1f1b")]
    found = analyze_trace(read_trace([write_trace(tmp_path / "run.csv", steps)]), layers=(4, 5, 5, 2))
    assert "cut" in {each.kind for each in found.what_ifs}


def _late(ops: Sequence[Any], ms: float) -> list[Any]:
    """The ops of a step, in which those of one rank stop for `ms` in its middle."""
    middle = max(timed.end for timed in ops) / 2
    return [
        replace(timed, start=timed.start + ms, end=timed.end + ms) if timed.start >= middle else timed
        for timed in ops
    ]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda found: predict(found, "zebra"), "no schedule named 'zebra'"),
        (lambda found: predict(found, "zb", channels="mpi"), "mpi"),
        (lambda found: predict(found, ps.build("zb", 4, 12)), "has 8 microbatches, the schedule zb has 12"),
        (lambda found: predict(found, ps.build("zb", 2, 8)), "has 4 ranks, the schedule zb has 2"),
        (lambda found: predict(found, cut=(5, 3, 3, 5)), "give them by --layers"),
        (lambda found: predict(found, layers=(4, 4, 4, 4), cut=(5, 3, 3)), "the cut is 5, 3, 3: give how many"),
        (lambda found: predict(found, layers=(4, 4, 4, 4), cut=(5, 3, 3, 4)), "of the 16 layers"),
        (lambda found: predict(found, layers=(8, 8), cut=(5, 3, 3, 5)), "each of the 4 recorded stages"),
        (lambda found: predict(found, links=ps.Links({(0, 1): "bandwidth:1MB/s"})), "bytes of a message"),
        (lambda found: predict(found, links=ps.Links({(0, 7): 1.0})), "7"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_refused(
    tmp_path: Path, call: Callable[[RunAnalysis], object], said: str
) -> None:
    found = analysis(tmp_path, run("1f1b"))
    with pytest.raises((TraceError, ps.ScheduleError, ps.CostError), match=said):
        call(found)


def test_a_trace_whose_steps_ran_other_orders_is_refused(tmp_path: Path) -> None:
    found = analysis(tmp_path, run("zb-h1"), run("zb"))
    with pytest.raises(TraceError, match="orders differ between steps"):
        predict(found, "1f1b")


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (ps.build("chimera", 4, 8), "stage 0 runs on ranks 0, 3, with some of its microbatches on each"),
        (
            ps.passes.recompute(ps.build("1f1b", 4, 8), replace(COSTS, kept_by_recompute=0.1), 2),
            "it has ops of kind R, and only orders of F, B, I and W",
        ),
    ],
)
def test_regression_steps_of_one_order_were_refused_as_of_several(
    tmp_path: Path, schedule: Schedule, said: str
) -> None:
    found = analysis(tmp_path, ps.simulate(schedule, COSTS))
    assert any(said in note for note in found.notes)
    with pytest.raises(TraceError, match=said) as refused:
        predict(found, "zb")
    assert "differ" not in str(refused.value)


def test_the_command_predicts_names_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "run.csv", [run("zb-h1")])
    for suffix in ("json", "csv"):
        ps.save(ps.build("zb", 4, 8), tmp_path / f"plan.{suffix}")
    tries = ["--try", "zb", "--try", str(tmp_path / "plan.json"), "--try", str(tmp_path / "plan.csv")]
    options = [*tries, "--link", "2:3=latency:30ms", "--channels", "gloo"]
    assert main(["analyze", str(trace), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tried"]
    true = run("zb", in_torch(COSTS), ps.Links({(2, 3): 30.0}), channels="gloo").makespan
    assert [each["time_ms"] for each in found] == [pytest.approx(true, rel=1e-3)] * 3
    assert all(each["bar_ms"][0] < each["time_ms"] < each["bar_ms"][1] for each in found)
    assert main(["analyze", str(trace), *options]) == 0
    said = capsys.readouterr().out
    assert "schedule" in said
    assert f"{true:,.1f}" in said
    assert "assumed: links but those given are as late as the trace shows" in said
    assert not list(tmp_path.glob("*.html"))
