"""Lines between ranks move to delegates and back while a model trains, whatever else carries messages.

NCCL's lines have a stand-in over gloo (see `device_queues`). No test asserts a time.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import penstock as ps
from device_queues import LateLines, stand_in_for_nccl
from in_step import count_time_in_steps
from plain_loop import plain_step
from processes import run_ranks_to_end
from waiting import PATIENCE, keep_up

pytestmark = pytest.mark.multiproc

NUM_RANKS, NUM_MICROBATCHES = 3, 4
ROUTES: list[tuple[tuple[int, int], ...]] = [(), ((0, 1),), ((0, 1), (1, 2)), ((1, 2),), (), ((0, 1),), ()]
"""Which links delegates carry in each step."""
LATE = ps.Links({(0, 1): "latency:4ms"})
DELEGATES = ps.runtime.DelegateOptions()


class Trained(NamedTuple):
    """What a rank has seen.

    Attributes:
        same: whether each loss, and each parameter in the end, has the plain loop's bits.
        received: in each step the messages that came by lines of NCCL's stand-in, and by the delegate.
        started: in each step whether the delegate ran when it began.
        memory: whether ranks sum in shared memory.
    """

    same: list[bool]
    received: list[tuple[int, int]]
    started: list[bool]
    memory: bool


def model() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(NUM_RANKS)]


def train(rank: int, options: ps.TransportOptions, dispatch: str) -> Trained:
    made: list[LateLines] = stand_in_for_nccl()
    stages = model()
    plain = copy.deepcopy(stages)
    plain_optimizer = torch.optim.SGD(nn.ModuleList(plain).parameters(), lr=0.1)
    same, received, started = [], [], []
    with ps.Pipeline(
        stages,
        ps.build("1f1b", NUM_RANKS, NUM_MICROBATCHES),
        loss_fn=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        dispatch=dispatch,
        timeout=PATIENCE,
        transport=options,
    ) as pipe:
        choice, transport = pipe._local.choice, pipe._local.transport
        before = (0, 0)
        for number, delegated in enumerate(ROUTES, start=1):
            started.append(bool(delegates_of(transport).pids))
            pipe.reconfigure(replace(pipe.configuration, delegated=delegated))
            torch.manual_seed(number)
            x = torch.randn(9 + number % 3, 8)  # shapes change while a line rests, too
            want = plain_step(plain, x, x.cos(), NUM_MICROBATCHES, nn.MSELoss(), step=number)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            same.append(torch.equal(want, pipe.step(x, x.cos()).loss))
            counters = choice.seen(transport)[1]
            assert counters is not None
            now = sum(lines.num_receives for lines in made), counters["messages"]
            received.append((now[0] - before[0], now[1] - before[1]))
            before = now
        theirs = dict(nn.ModuleList(plain).named_parameters())
        same += [torch.equal(parameter, theirs[name]) for name, parameter in pipe.named_parameters()]
        return Trained(same, received, started, choice.memory_of(transport) is not None)


def delegates_of(transport: Any) -> Any:
    while not hasattr(transport, "delegates"):
        transport = transport.inner
    return transport.delegates


def expected(rank: int, delegated: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """How many messages of a step come to a rank by its fast path, and by its delegate."""
    peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < NUM_RANKS]
    slow = sum((min(rank, peer), max(rank, peer)) in delegated for peer in peers)
    return NUM_MICROBATCHES * (len(peers) - slow), NUM_MICROBATCHES * slow


CASES = [
    ("nccl", "dynamic", LATE),
    ("nccl", "frozen", None),
    ("host", "frozen", None),
    ("host", "dynamic", LATE),
    pytest.param("gloo", "frozen", LATE, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("name", "dispatch", "links"), CASES)
def test_lines_of_nccl_and_of_shared_memory_never_moved_to_delegates(
    name: str, dispatch: str, links: ps.Links | None
) -> None:
    """Delegated links were refused over NCCL, and "host" lost shared memory as soon as links might be delegated."""
    options = ps.TransportOptions(name, delegates=DELEGATES, links=links)
    outcomes = run_ranks_to_end(NUM_RANKS, train, options, dispatch)
    for rank, trained in enumerate(o.value for o in outcomes):
        assert all(trained.same)
        assert len(trained.same) == len(ROUTES) + 2
        want = [expected(rank, delegated) for delegated in ROUTES]
        assert trained.received == [(fast if name == "nccl" else 0, slow) for fast, slow in want]
        assert trained.memory == (name == "host" and links is None)
        needed = [bool(slow) for _, slow in want]
        assert trained.started == [any(needed[:step]) for step in range(len(ROUTES))]


MOST_STEPS = 150
"""Steps within which a link must have moved. One does after some ten, later where the machine is busy."""
TURNS_LATE = ps.Links.parse("1:2=latency:steps:0ms/0ms,1200ms/40ms,10min/0ms")
"""The link to the last rank turns late after twelve steps, when costs have been measured."""


class Busy(nn.Module):
    """A layer that takes some milliseconds, so that a rank that stands still loses something."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.003)
        return torch.tanh(self.linear(x))


def adapt(rank: int, name: str, folder: str) -> tuple[list[tuple[tuple[int, int], ...]], list[bool], list[str]]:
    """Trains until the controller has delegated a link for three steps: what was delegated in each step."""
    stand_in_for_nccl()
    begin = count_time_in_steps()
    torch.manual_seed(5)
    stages: list[nn.Module] = [Busy() for _ in range(NUM_RANKS)]
    plain, same = copy.deepcopy(stages), []
    routes: list[tuple[tuple[int, int], ...]] = []
    with ps.Pipeline(
        stages,
        ps.build("gpipe", NUM_RANKS, NUM_MICROBATCHES),
        loss_fn=nn.MSELoss(),
        timeout=PATIENCE,
        # A line of NCCL carries one message at a time; of others, only a bound makes messages wait.
        transport=ps.TransportOptions(name, depth=None if name == "nccl" else 1, links=TURNS_LATE),
        adapt=ps.AdaptOptions(folder=folder if rank == 0 else None, dispatches=(), may_replan=False),
    ) as pipe:
        for number in range(1, MOST_STEPS):
            if sum(map(bool, routes)) == 3:
                break
            if rank == 0:
                keep_up(Path(folder), number - 1)
            begin(number - 1)
            torch.manual_seed(number)
            x = torch.randn(8, 8)
            want = plain_step(plain, x, x.cos(), NUM_MICROBATCHES, nn.MSELoss(), step=number)
            routes.append(pipe.configuration.delegated)
            same.append(torch.equal(want, pipe.step(x, x.cos(), update=False).loss))
        return routes, same, pipe.notices


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", ["nccl", pytest.param("host", marks=pytest.mark.nightly)])
def test_adapting_over_nccl_was_refused(name: str, tmp_path: Path) -> None:
    """The controller hands a late link to delegates while the others stay with NCCL, and no number changes."""
    outcomes = run_ranks_to_end(NUM_RANKS, adapt, name, str(tmp_path), deadline=240.0)
    routes, _, notices = outcomes[0].value
    assert all(o.value[0] == routes and all(o.value[1]) for o in outcomes)
    assert routes[-3:] == [((1, 2),)] * 3, notices
