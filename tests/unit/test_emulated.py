"""Emulated devices with a thread a rank, and link conditions in one process. No test asserts an upper time."""

from __future__ import annotations

import json
import threading
import time
from itertools import product
from pathlib import Path

import pytest
from torch import nn

import penstock as ps
from emulated_ranks import wired_op
from penstock.cli import main
from penstock.cost.links import Links
from penstock.runtime import DeadlineExceeded, RuntimeFailure
from penstock.runtime.emulation.backend import EmulatedBackend
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.link_conditions import Conditions
from penstock.runtime.transport.wiring import wire
from penstock.simulation import Timeline
from tiers import others_nightly

pytestmark = pytest.mark.unit


def uniform(schedule: ps.Schedule, ms: float = 2.0) -> ps.Costs:
    return ps.Costs.uniform(schedule.num_stages, ms, ms, ms)


def assert_plausible(measured: Timeline, costs: ps.Costs, links: Links | None = None) -> None:
    """No rank is quicker than its ops, nothing starts before what it needs has come, and all ops are there."""
    schedule = measured.schedule
    assert measured.source == "measured"
    assert sorted(t.op for t in measured.ops) == sorted(op for row in schedule.order for op in row)
    busy = [sum(costs.duration(op.kind, op.stage) for op in row) for row in schedule.order]
    assert measured.makespan >= max(busy) * (1 - 1e-9)
    started = {t.op: t.start for t in measured.ops}
    for message in measured.messages:
        name = (links or Links()).named(message.source_rank, message.target_rank)[1]
        latency = name.latency.at(0.0, "") if name is not None else 0.0
        assert started[message.target] >= message.sent + latency - 1e-9


DISPATCHES = "frozen", "hinted", "dynamic"
EMULATED = "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "chimera", "gpipe"


@pytest.mark.parametrize(
    ("name", "dispatch"),
    others_nightly(
        product(EMULATED, DISPATCHES), [(name, DISPATCHES[number % 3]) for number, name in enumerate(EMULATED)]
    ),
)
def test_a_schedule_runs_as_it_is(name: str, dispatch: str) -> None:
    schedule = ps.build(name, num_ranks=4, num_microbatches=8)
    costs = uniform(schedule)
    run = ps.emulate(schedule, costs, dispatch=dispatch, num_steps=2)
    frozen = ps.simulate(schedule, costs).peak_activations
    assert len(run.timelines) == len(run.simulated) == len(run.errors) == 2
    assert run.simulated[0].makespan == ps.simulate(schedule, costs, dispatch=dispatch).makespan
    for timeline in run.timelines:
        assert_plausible(timeline, costs)
        assert timeline.dispatch == dispatch
        if dispatch == "frozen":
            assert timeline.executed().order == schedule.order
            assert timeline.peak_activations == frozen
        assert all(a <= b for a, b in zip(timeline.peak_activations, frozen, strict=True))


def test_a_late_link_makes_it_longer_by_what_it_says() -> None:
    schedule = ps.build("1f1b", num_ranks=2, num_microbatches=1)
    costs, links = uniform(schedule), Links.parse("0:1=latency:40ms")
    run = ps.emulate(schedule, costs, links=links)
    assert_plausible(run.timelines[0], costs, links)
    assert run.timelines[0].makespan >= run.simulated[0].makespan == 2 + 40 + 2 + 4 + 40 + 4
    assert run.conditions == links


def test_a_busy_link_makes_messages_queue() -> None:
    schedule = ps.build("gpipe", num_ranks=2, num_microbatches=4)
    links = Links.parse("0:1=occupancy:30ms 1:0=latency:0")
    run = ps.emulate(schedule, uniform(schedule), links=links)
    starts = [t.start for t in run.timelines[0].rows[1] if t.op.kind == "F"]
    assert all(start >= 30 * place for place, start in enumerate(starts, start=1))


def test_plain_delays_are_latencies() -> None:
    schedule = ps.build("1f1b", num_ranks=2, num_microbatches=1)
    run = ps.emulate(schedule, uniform(schedule), links=ps.Links({(0, 1): 25.0}))
    assert str(run.conditions) == "0:1=latency:25ms"
    assert run.timelines[0].makespan >= 50 + 12


def test_stretching_slows_ops_and_links_and_is_divided_out() -> None:
    schedule = ps.build("1f1b", num_ranks=2, num_microbatches=2)
    costs, links = uniform(schedule), Links.parse("0:1=latency:10ms")
    begin = time.perf_counter()
    run = ps.emulate(schedule, costs, links=links, stretch=4.0)
    took = (time.perf_counter() - begin) * 1e3
    assert_plausible(run.timelines[0], costs, links)
    assert took >= 4 * run.simulated[0].makespan


def test_time_owed_is_made_good_by_the_next_op_only_while_there_is_work() -> None:
    schedule = ps.build("gpipe", num_ranks=1, num_microbatches=40)
    costs = ps.Costs.uniform(1, 1.0, 0.5, 0.5)
    wiring = wire(schedule)
    device = EmulatedBackend(wiring, costs)
    device.begin()
    begin = time.perf_counter_ns()
    for wired in wiring.wired_ops[:40]:
        device.run(wired, [])
        time.sleep(0.0003)
    # Each op made up for the pause before it, down to nothing: only the last pauses may be left.
    assert len(device.late) == 40
    assert min(device.late) >= 0
    assert time.perf_counter_ns() - begin >= 40e6
    idle = time.perf_counter_ns()
    time.sleep(0.02)
    woke = time.perf_counter_ns()
    device.waited(idle, woke)
    device.run(wiring.wired_ops[0], [])
    assert time.perf_counter_ns() - woke >= 1e6, "time spent waiting is not owed"


def test_a_message_for_another_op_is_an_error() -> None:
    schedule = ps.build("1f1b", num_ranks=2, num_microbatches=2)
    wiring = wire(schedule)
    sender, receiver = EmulatedBackend(wiring, uniform(schedule)), EmulatedBackend(wiring, uniform(schedule))
    sent, other, meant = (wired_op(wiring, op) for op in (ps.Op("F", 0, 0), ps.Op("F", 1, 1), ps.Op("F", 1, 0)))
    payloads = sender.run(sent, [])
    with pytest.raises(RuntimeFailure, match="received something else than F1 of stage 0"):
        receiver.run(other, payloads)
    receiver.run(meant, payloads)


def test_messages_have_the_stated_size() -> None:
    schedule = ps.build("1f1b", num_ranks=2, num_microbatches=1)
    costs = ps.Costs([1, 1], [1, 1], [1, 1], message_bytes=[1000, 7])
    wiring = wire(schedule)
    device = EmulatedBackend(wiring, costs)
    (sent,) = device.run(wired_op(wiring, ps.Op("F", 0, 0)), [])
    assert [leaf.numel() for leaf in sent.leaves if leaf is not None][1] == 1000
    backward = wired_op(wiring, ps.Op("B", 1, 0))
    (back,) = device.run(backward, [Payload([]) for _ in backward.inputs])
    assert [leaf.numel() for leaf in back.leaves if leaf is not None][1] == 1000, "a gradient weighs what it is of"


def test_what_can_not_be_is_said() -> None:
    schedule = ps.build("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ps.CostError, match="link 0:5: ranks go from 0 to 1"):
        ps.emulate(schedule, uniform(schedule), links=Links.parse("0:5=20"))
    with pytest.raises(ps.CostError, match="costs are for 3 stages, the schedule has 2"):
        ps.emulate(schedule, ps.Costs.uniform(3))
    with pytest.raises(ps.CostError, match="num_steps is 0"):
        ps.emulate(schedule, uniform(schedule), num_steps=0)
    with pytest.raises(ps.CostError, match="stretched by 0"):
        ps.emulate(schedule, uniform(schedule), stretch=0.0)
    with pytest.raises(ps.ScheduleError, match="the cap is 0"):
        ps.emulate(schedule, uniform(schedule), dispatch="dynamic", memory_limit=0)


def test_a_message_that_does_not_come_in_time_is_named_and_all_ranks_end() -> None:
    schedule = ps.build("1f1b", num_ranks=3, num_microbatches=2)
    with pytest.raises(DeadlineExceeded, match=r"nothing came in for 0.8 s: rank \d waits to run [FB]0 of stage"):
        ps.emulate(schedule, uniform(schedule), links=Links.parse("0:1=latency:1min"), timeout=0.8)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-rank")]


# What keeps messages back.


def test_a_pipeline_refuses_links_that_are_not_there() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with pytest.raises(ps.CostError, match="link 0:7"):
        ps.Pipeline(model, ps.build("1f1b", 2, 2), transport=ps.TransportOptions(links=Links.parse("0:7=latency:1")))


def test_conditions_go_by_their_own_clock() -> None:
    conditions = Conditions(Links.parse("0:1=latency:steps:0/1,1000000/5"), stretch=2.0)
    sent = time.perf_counter_ns()
    assert conditions.due(0, 1, 0.0, sent) >= sent + 2_000_000
    later = Conditions(Links.parse("0:1=latency:steps:0/1,1000/5"), origin=time.perf_counter_ns() - 10**9)
    sent = time.perf_counter_ns()
    assert later.due(0, 1, 0.0, sent) >= sent + 5_000_000 - 1000


# From the command line.


@pytest.mark.parametrize(
    ("link", "said"),
    {
        "0:9=latency:3": "--link: link 0:9: ranks go from 0 to 3",
        "0:1=latency:trace:/nowhere": "trace /nowhere: No such file or directory",
        "0:1=fog:3": "--link: link '0:1=fog:3': 'fog' is not a condition",
        "0:1=latency:-3": "give a number of at least 0",
    }.items(),
)
def test_training_refuses_conditions_that_make_no_sense(
    link: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", "--link", link, "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_settings_keep_conditions() -> None:
    from penstock.train.settings import Settings

    settings = Settings.from_mapping(json.loads(Settings(link="0:1=20 2:3=loss:1%").to_json()))
    assert settings.link_conditions() == Links.parse("0:1=latency:20ms 2:3=loss:1%")
    assert Settings().link_conditions() is None
