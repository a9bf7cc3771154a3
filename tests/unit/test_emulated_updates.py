"""Emulated runs with updates and with several pipelines, a thread a rank. No test asserts an upper time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from emulated_ranks import wired_op
from penstock.cli.emulate import with_message_cap
from penstock.cost.links import Links
from penstock.passes import recompute
from penstock.runtime import RuntimeFailure
from penstock.runtime.emulation import backend as emulated
from penstock.runtime.emulation.backend import EmulatedBackend
from penstock.runtime.execute.timeline import measured_costs
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.wiring import wire
from penstock.simulation import TimedOp, Timeline
from tied_updates_loop import with_rule

AMDP_GPT = ps.cost.costs_preset("amdp-gpt", 8)
pytestmark = pytest.mark.unit


def costs_of(schedule: ps.Schedule, ms: float = 1.0) -> ps.Costs:
    """Every kind of op, every stage and its copies with a time of their own."""
    num = schedule.num_stages
    costs = ps.Costs(
        [ms] * num,
        [ms] * num,
        [ms] * num,
        update_bytes=[1e9] * num,
        take_over=[0.25 + stage / 8 for stage in range(num)],
    )
    return costs.with_other({("U", stage): 2.0 + stage / 4 for stage in range(num)})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("amdp", {"window": 8}),
        ("pipedream-2bw", {"window": 4}),
        ("pipedream", {"window": 1}),
        ("chimera", {}),
        ("bitpipe", {}),
    ],
)
@pytest.mark.parametrize("transport", ["host", "direct"])
def test_measured_order_is_the_schedule_s(name: str, options: dict[str, Any], transport: str) -> None:
    schedule = ps.build(name, 4, 16, **options)
    costs = costs_of(schedule)
    run = ps.emulate(schedule, costs, transport=transport)
    (timeline,) = run.timelines
    assert timeline.executed().order == schedule.order
    assert run.simulated[0].makespan == ps.simulate(schedule, costs).makespan
    assert timeline.makespan >= max(run.simulated[0].busy) * (1 - 1e-9)
    ended = {timed.op: timed.end for timed in timeline.ops}
    started = {timed.op: timed.start for timed in timeline.ops}
    updates = [m for m in timeline.messages if m.target.kind == "U"]
    assert bool(updates) == (name == "amdp")
    assert all(started[m.target] >= ended[m.source] for m in timeline.messages)


def test_an_update_takes_longest_on_the_copy_that_owns_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]

    def sleep(due: int) -> None:
        now[0] = max(now[0], due)

    monkeypatch.setattr(emulated, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(emulated, "sleep_until", sleep)
    schedule = ps.build("amdp", 4, 16, window=8)
    wiring = wire(schedule)
    device = EmulatedBackend(wiring, costs_of(schedule))
    took = []
    for number in (0, 1):  # pipeline 0 owns the stage
        before = now[0]
        op = ps.Op("U", 2, number)
        device.run(wired_op(wiring, op), [Payload([]) for _ in wiring.incoming[op]])
        took.append((now[0] - before) / 1e6)
    assert took == [2.5, 0.5]


def test_gradients_and_parameters_take_the_time_of_their_bytes() -> None:
    schedule = ps.build("amdp", 4, 8, window=8)
    links = Links.parse("0:3=bandwidth:100GB/s")  # 10 ms each way for what updates send
    (timeline,) = ps.emulate(schedule, costs_of(schedule), links=links).timelines
    started = {timed.op: timed.start for timed in timeline.ops}
    found = [m for m in timeline.messages if m.target.kind == "U" and {m.source_rank, m.target_rank} == {0, 3}]
    assert {m.source.kind for m in found} == {"B", "U"}, "gradients one way, parameters the other"
    assert all(started[m.target] >= m.sent + 10 for m in found)


def test_a_message_of_another_update_is_an_error() -> None:
    schedule = ps.build("amdp", 4, 16, window=8)
    wiring = wire(schedule)
    owner = next(op for op in schedule.order[0] if op.kind == "U" and schedule.pipeline_of(op) == 0)
    (edge,) = wiring.incoming[owner]
    later = next(e for e in wiring.outgoing[edge.producer._replace(microbatch=15)] if e.is_update)
    sender, receiver = (EmulatedBackend(wiring, costs_of(schedule)) for _ in range(2))
    sending = wired_op(wiring, later.producer)
    sent = sender.run(sending, [Payload([]) for _ in sending.inputs])
    with pytest.raises(RuntimeFailure, match="U0 received something else than the window's gradients after B7"):
        receiver.run(wired_op(wiring, owner), [sent[sending.output_edges.index(later)]])


@pytest.mark.parametrize("dispatch", ["hinted", "dynamic"])
def test_a_run_with_updates_takes_any_dispatch_and_keeps_their_windows(dispatch: str) -> None:
    schedule = ps.build("amdp", 4, 16, window=8)
    (timeline,) = ps.emulate(schedule, costs_of(schedule), dispatch=dispatch, num_steps=1).timelines
    assert timeline.dispatch == dispatch
    ran = timeline.executed()
    assert ran.updates == schedule.updates
    ps.check(ran)


@pytest.mark.parametrize(
    ("name", "options"), [("amdp", {"window": 8}), ("pipedream-2bw", {"window": 4}), ("chimera", {})]
)
def test_such_a_run_is_measured_and_keeps_its_order(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    schedule = ps.build(name, 4, 16, **options)
    run = ps.emulate(schedule, costs_of(schedule), num_steps=2, adapt=ps.AdaptOptions(folder=tmp_path))
    assert {each.schedule for each in run.configurations} == {schedule}
    assert run.notices == ()


def timeline_of(schedule: ps.Schedule, times: dict[ps.Op, float]) -> Timeline:
    """A made-up measurement: ops one after the other, each as long as it is said to be."""
    ops = []
    for rank, row in enumerate(schedule.order):
        now = 0.0
        for op in row:
            ops.append(TimedOp(rank, op, now, now + times[op], None, 0.0))
            now += times[op]
    return Timeline(schedule, tuple(ops), (), (0.0,) * schedule.num_ranks, "measured", "frozen")


def test_measured_costs_keep_updates_of_owners_and_of_copies_apart() -> None:
    schedule = ps.build("amdp", 4, 16, window=8)
    true = costs_of(schedule)

    def took(op: ps.Op, factor: float) -> float:
        return factor * true.duration(op.kind, op.stage, owns=op.kind != "U" or schedule.pipeline_of(op) == 0)

    ops = [op for row in schedule.order for op in row]
    timelines = [timeline_of(schedule, {op: took(op, factor) for op in ops}) for factor in (0.5, 1.5)]
    found = measured_costs(timelines)
    for stage in range(4):
        assert found.duration("U", stage) == pytest.approx(2.0 + stage / 4)
        assert found.duration("U", stage, owns=False) == pytest.approx(0.25 + stage / 8)
        assert found.duration("F", stage) == pytest.approx(1.0)
        assert found.duration("B", stage) == pytest.approx(2.0)
    assert ps.simulate(schedule, found).makespan == pytest.approx(ps.simulate(schedule, true).makespan)


def test_measured_costs_keep_forwards_that_ran_again() -> None:
    schedule = recompute(ps.build("1f1b", 2, 4), ps.Costs.uniform(2), [1.5, 1.0])
    ops = [op for row in schedule.order for op in row]
    found = measured_costs([timeline_of(schedule, {op: {"F": 1.0, "B": 2.0, "R": 0.7}[op.kind] for op in ops})])
    assert found.duration("R", 0) == pytest.approx(0.7)
    assert found.duration("R", 1) == found.duration("F", 1) == 1.0


@pytest.mark.parametrize("name", ["amdp", "chimera"])
def test_links_of_such_a_run_are_measured_where_nothing_is_to_change(name: str) -> None:
    schedule = ps.build(name, 4, 16, **({"window": 8} if name == "amdp" else {}))
    steering = ps.AdaptOptions(may_replan=False, may_delegate=False, dispatches=())
    with ps.runtime.EmulatedPipeline(schedule, costs_of(schedule), adapt=steering) as pipe:
        steps = [pipe.step() for _ in range(2)]
        assert not pipe.decisions
    assert [step.timeline.executed().order for step in steps] == [schedule.order] * 2


def test_the_command_cuts_what_updates_send() -> None:
    schedule = ps.build("amdp", 8, 16, window=8)
    costs, is_cut = with_message_cap(AMDP_GPT, schedule, "64MB")
    assert is_cut
    assert set(costs.update_bytes) == {64e6}
    assert not with_message_cap(AMDP_GPT, ps.build("1f1b", 8, 16), "64MB")[1], "activations alone are smaller"


def test_predictions_for_copies_are_part_of_what_updates_send() -> None:
    """As large as that comes to, up to the cap; every copy that has the optimizer's state predicts for itself."""
    amdp = ps.build("amdp", 8, 32, window=8)
    schedule = with_rule(amdp, "xpipe")

    def size(cap: str, of: ps.Schedule = schedule, update: int = 0) -> float:
        (costs, _), windows = with_message_cap(AMDP_GPT, of, cap), of.windows
        assert windows is not None
        owner, other = (("U", 1, windows.number(update, pipeline)) for pipeline in (0, 1))
        assert costs.message_size(("B", 1, 7), owner) == costs.update_bytes[1]
        return costs.message_size(owner, other)

    whole = size("100GB", of=amdp)
    assert [size("100GB", update=update) for update in range(4)] == [2 * whole, 2 * whole, whole, whole]
    assert size("64MB") == 64e6 < whole
    between = f"{whole * 1.5 / 1e6:.0f}MB"
    assert size(between) == pytest.approx(1.5 * whole, abs=1e6)
    assert not with_message_cap(AMDP_GPT, amdp, between)[1]
    assert with_message_cap(AMDP_GPT, schedule, between)[1]


def test_emulated_updates_send_predictions_and_take_as_long_as_simulated() -> None:
    schedule = with_rule(ps.build("amdp", 4, 16, window=4), "xpipe")
    costs = costs_of(schedule).with_predictions(schedule)
    run = ps.emulate(schedule, costs, transport="direct")
    assert run.timelines[0].executed().order == schedule.order
    assert run.simulated[0].makespan == ps.simulate(schedule, costs).makespan
    links = Links.parse(["0:3=bandwidth:1GB/s", "3:0=bandwidth:1GB/s"])
    heavy, light = (ps.simulate(schedule, each, links=links) for each in (costs, costs_of(schedule)))
    assert max(m.arrived - m.sent for m in light.messages if m.source.kind == "U" == m.target.kind) < 1999
    assert max(m.arrived - m.sent for m in heavy.messages if m.source.kind == "U" == m.target.kind) > 1999
