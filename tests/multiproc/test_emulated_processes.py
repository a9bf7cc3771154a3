"""Emulated devices with a process a rank, and link conditions between processes. No test asserts an upper time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from backends import Backend, backends
from device_queues import lines_over_gloo
from penstock.cost.links import Links
from penstock.runtime import DeadlineExceeded, RuntimeFailure
from penstock.runtime.emulation import pipeline as emulated
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.link_conditions import ConditionedTransport, Conditions
from penstock.runtime.transport.nccl import lines_of
from penstock.runtime.transport.wiring import wire
from plain_loop import gradients
from processes import appears, run_ranks, run_ranks_to_end
from waiting import PATIENCE, shorten

pytestmark = pytest.mark.multiproc

LINKS = "0:1=latency:20ms+bandwidth:100MB/s 1:2=latency:normal:8ms,3ms@5..9ms+loss:2%"


def emulate(rank: int, name: str, dispatch: str) -> tuple[list[Any], ...]:
    schedule = ps.build(name, 3, 6)
    num = schedule.num_stages
    costs = ps.Costs([2.0] * num, [2.0] * num, [2.0] * num, message_bytes=[100_000] * num)
    run = ps.emulate(schedule, costs, links=Links.parse(LINKS), dispatch=dispatch, num_steps=2, timeout=PATIENCE)
    assert len(run.simulated) == 2
    for timeline in run.timelines:
        started = {t.op: t.start for t in timeline.ops}
        assert sorted(started) == sorted(op for row in schedule.order for op in row)
        busy = [sum(costs.duration(op.kind, op.stage) for op in row) for row in schedule.order]
        assert timeline.makespan >= max(busy) * (1 - 1e-9)
        for message in timeline.messages:
            if {message.source_rank, message.target_rank} == {0, 1}:
                assert started[message.target] >= message.sent + 21 - 1e-9
        if dispatch == "frozen":
            assert timeline.executed().order == schedule.order
    return [timeline.ops for timeline in run.timelines], [run.starts, run.own_latency, run.late]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dispatch"), [("zb-h1", "dynamic"), ("interleaved-1f1b", "frozen")])
def test_a_run_over_slow_links_is_the_same_on_every_rank(name: str, dispatch: str) -> None:
    outcomes = run_ranks_to_end(3, emulate, name, dispatch)
    assert outcomes[0].value == outcomes[1].value == outcomes[2].value


def measure_the_first_step(rank: int, links: str) -> list[tuple[int, bool]]:
    """How long each message of the first step took, and whether it came after the step began."""
    schedule = ps.build("1f1b", 2, 6)
    with ps.runtime.EmulatedPipeline(
        schedule, ps.Costs.uniform(2), links=Links.parse(links) if links else None, timeout=PATIENCE
    ) as pipe:
        step = pipe.step()
    return [(crossing.duration, crossing.arrived >= step.began) for crossing in step.crossings]


@pytest.mark.parametrize("links", ["", "0:1=bandwidth:10MB/s+latency:5ms"])
def test_messages_that_connect_the_ranks_are_not_measured_as_the_first_step(links: str) -> None:
    outcomes = run_ranks_to_end(2, measure_the_first_step, links)
    for outcome in outcomes:
        assert all(is_later for _, is_later in outcome.value)
        if links:  # whose conditions tell every message's moment; without, a message may lie unseen and is left out
            assert len(outcome.value) == 6
            assert all(duration >= 5e6 for duration, _ in outcome.value)


def differ(rank: int) -> str:
    links = Links.parse("0:1=latency:20ms" if rank else "0:1=latency:30ms")
    with pytest.raises(RuntimeFailure) as raised:
        ps.emulate(ps.build("1f1b", 2, 2), ps.Costs.uniform(2), links=links, timeout=PATIENCE)
    return str(raised.value)


def test_other_conditions_on_other_ranks_are_refused() -> None:
    outcomes = run_ranks(2, differ)
    said = (
        "rank 1 was given another link condition than rank 0 (rank 1 has '0:1=latency:20ms', rank 0 has "
        "'0:1=latency:30ms'); every rank must make the same ps.emulate(...), all on one machine"
    )
    assert [o.value for o in outcomes] == [said, said], outcomes[0].text


def on_several_machines(rank: int) -> str:
    emulated.clock_name = lambda: f"machine {rank}"
    with pytest.raises(RuntimeFailure) as raised:
        ps.emulate(ps.build("1f1b", 2, 2), ps.Costs.uniform(2), timeout=PATIENCE)
    return str(raised.value)


def test_machines_whose_clocks_began_at_other_times_are_refused() -> None:
    """The rank of the machine that was started last slept for the difference, and the others lost it."""
    assert all("all on one machine" in o.value for o in run_ranks(2, on_several_machines))


def late(rank: int, folder: Path) -> str:
    schedule = ps.build("1f1b", 2, 2)
    # Rank 0 waits for a gradient that is under way for a minute; rank 1 is done, and waits for rank 0's figures.
    links = Links.parse("0:1=latency:0 1:0=latency:1min")
    with ps.runtime.EmulatedPipeline(schedule, ps.Costs.uniform(2), links=links, timeout=PATIENCE) as pipe:
        shorten(pipe, 2.0)
        dist.barrier()  # no rank waits for one that begins late
        try:
            pipe.step()
        except DeadlineExceeded as error:
            (folder / f"{rank}").touch()
            appears(folder / f"{1 - rank}")  # which has its own deadline, and is not to lose this rank before
            return str(error)
    return "nothing"


@pytest.mark.slow
def test_a_held_message_meets_the_deadline(tmp_path: Path) -> None:
    outcomes = run_ranks_to_end(2, late, tmp_path)
    held = "nothing came in for 2 s: rank 0 waits to run B0 of stage 0, which needs B0 of stage 1 from rank 1"
    assert outcomes[0].value == held
    assert outcomes[1].value.startswith("rank 1 waited 2 s for "), outcomes[1].value


def train(rank: int, dispatch: str) -> list[bool]:
    """Steps of changing shapes, with and without conditions; and evaluation, whose channels have windows."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [torch.randn(size, 4) for size in (8, 7, 12, 8)]
    found: list[list[torch.Tensor]] = []
    for links in (None, Links.parse("0:1=latency:15ms+loss:5% 1:2=occupancy:2ms")):
        model.load_state_dict(start)
        pipe = ps.Pipeline(
            model,
            ps.build("zb-h1", 3, 4),
            loss_fn=nn.MSELoss(),
            dispatch=dispatch,
            timeout=PATIENCE,
            transport=ps.TransportOptions(links=links),
        )
        numbers = []
        for x in batches:
            y = x.sum(1, keepdim=True)
            numbers.append(pipe.step(x, y, update=False).loss)
            makespan = pipe.timeline().makespan
            assert links is None or makespan >= 30, "there and back over the link that is 15 ms late"
            numbers.append(pipe.evaluate(x, y).loss)
        mine = {n: p.grad for n, p in pipe.named_parameters()}
        found.append(numbers + [grad for name, grad in gradients(model).items() if name in mine and grad is not None])
        pipe.zero_grad()
    assert found[0], "something was compared"
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
@pytest.mark.parametrize("backend", backends(3))
def test_training_has_the_same_numbers_on_slow_links(backend: Backend, dispatch: str) -> None:
    for same in backend.values(train, dispatch):
        assert all(same)
        assert len(same) > 8


def train_through_lines(rank: int) -> list[bool]:
    """The transport of NCCL, over gloo: what is held keeps its order on a line."""
    found = []
    for links in (None, Links.parse("0:1=latency:normal:10ms,8ms@1ms..3ms")):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        schedule = ps.build("zb-h1", 3, 6)
        pipe = ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), timeout=PATIENCE)
        assert isinstance(pipe._local.peers, GroupPeers)
        group = pipe._local.peers.group
        lines = lines_over_gloo(group, lines_of(wire(schedule)), PATIENCE)
        plain = GlooTransport(group, pipe._local.tags, PATIENCE, lines=lines)
        pipe._local.transport = plain if links is None else ConditionedTransport(plain, Conditions(links))
        x = torch.randn(12, 4)
        loss = pipe.step(x, x.sum(1, keepdim=True), update=False).loss
        found.append([loss, *(p.grad for p in pipe.parameters())])
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


def test_lines_have_the_same_numbers_when_slow() -> None:
    outcomes = run_ranks_to_end(3, train_through_lines)
    assert all(all(o.value) and len(o.value) > 1 for o in outcomes)
