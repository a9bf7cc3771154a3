"""Emulated runs with updates and with several pipelines, a process a rank. No test asserts an upper time."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from device_queues import lines_over_gloo
from penstock.cost.links import Links
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.link_conditions import ConditionedTransport, Conditions
from penstock.runtime.transport.nccl import lines_of
from processes import run_ranks, run_ranks_to_end
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

SCHEDULES: dict[str, dict[str, Any]] = {"amdp": {"window": 8}, "pipedream-2bw": {"window": 4}, "chimera": {}}
TRANSPORTS = {"host": tuple(SCHEDULES), "direct": ("amdp", "chimera"), "delegate": ("amdp", "chimera")}
LINKS = Links.parse("0:1=latency:3ms+bandwidth:100MB/s 0:3=latency:3ms+bandwidth:100MB/s")


def build(name: str) -> tuple[ps.Schedule, ps.Costs]:
    schedule = ps.build(name, 4, 16, **SCHEDULES[name])
    num = schedule.num_stages
    costs = ps.Costs(
        [1.0] * num,
        [1.0] * num,
        [1.0] * num,
        message_bytes=[10_000] * num,
        update_bytes=[100_000] * num,
        take_over=[0.5] * num,
    )
    return schedule, costs.with_other({("U", stage): 2.0 for stage in range(num)})


def check_timeline(schedule: ps.Schedule, timeline: ps.Timeline) -> None:
    """The schedule's own order, and nothing before its message has come over the slow links, rank 0's."""
    assert timeline.executed().order == schedule.order
    started = {timed.op: timed.start for timed in timeline.ops}
    sent = [m for m in timeline.messages if {m.source_rank, m.target_rank} in ({0, 1}, {0, 3})]
    assert sent
    assert any(m.target.kind == "U" for m in sent) == (schedule.name == "amdp"), "which has copies and updates"
    for message in sent:
        size = 100_000 if message.target.kind == "U" else 10_000
        assert started[message.target] >= message.sent + 3 + size / 100e3 - 1e-9


def emulate(rank: int) -> list[Any]:
    found = []
    for transport, names in TRANSPORTS.items():
        for name in names:
            schedule, costs = build(name)
            run = ps.emulate(schedule, costs, links=LINKS, num_steps=2, timeout=PATIENCE, transport=transport)
            for timeline in run.timelines:
                check_timeline(schedule, timeline)
            found.append((transport, name, [timeline.ops for timeline in run.timelines]))
    return found


@pytest.mark.slow
def test_updates_and_several_pipelines_run_in_the_order_of_the_schedule() -> None:
    outcomes = run_ranks_to_end(4, emulate)
    assert len(outcomes[0].value) == 7
    assert all(o.value == outcomes[0].value for o in outcomes)


def through_lines(rank: int) -> bool:
    """The transport of NCCL, over gloo: a rank is at both ends of channels between the same stages."""
    schedule, costs = build("amdp")
    with ps.runtime.EmulatedPipeline(schedule, costs, timeout=PATIENCE) as pipe:
        assert isinstance(pipe._peers, GroupPeers)
        assert pipe._transport is not None
        pipe._transport.close()
        group, channels = pipe._peers.group, lines_of(pipe._plan.plan.wiring)
        lines = lines_over_gloo(group, channels, PATIENCE)
        pipe._transport = ConditionedTransport(
            GlooTransport(group, pipe._plan.tags, PATIENCE, lines=lines), Conditions(LINKS)
        )
        check_timeline(schedule, pipe.step().timeline)
        return len({line.key for line in channels}) < len(channels)


def test_lines_tell_the_two_directions_of_a_channel_apart() -> None:
    outcomes = run_ranks(4, through_lines)
    assert [o.value for o in outcomes] == [True] * 4, outcomes[0].text
