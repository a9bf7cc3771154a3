"""What comes to a stage in host memory, as most transports bring it, though the stage lies on another device.

That device is torch's `meta` here. It keeps no numbers, but says, as a GPU does, that an op was given tensors of two
devices; and ranks of one process send by way of host memory. Numbers are compared on GPUs, by `tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime.execute import step_end
from penstock.runtime.stage.host_memory import on_device
from penstock.runtime.stage.ops import StageRunner
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.loopback import LoopbackTransport
from tiers import others_nightly

META = torch.device("meta")
WIDTH = 8
FORK = ps.schedule.StageGraph(4, ((0, 1), (0, 2), (1, 3), (2, 3)))
FEWER = ps.schedule.StageGraph(4, ((0, 1), (1, 2), (2, 3)), num_microbatches=(8, 8, 4, 4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if other is not None:
            x = x + other
        return x + self.down(torch.tanh(self.up(x)))


@pytest.fixture
def by_host_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has what ranks send each other lie in host memory; the number of tensors of each message."""
    sent: list[int] = []
    send = LoopbackTransport.send

    def send_by_host(self: LoopbackTransport, edge: Any, target: int, payload: Payload) -> bool:
        leaves = [None if leaf is None else torch.zeros(leaf.shape, dtype=leaf.dtype) for leaf in payload.leaves]
        sent.append(len(leaves))
        return send(self, edge, target, Payload(leaves, payload.skeleton, payload.needs_grad))

    monkeypatch.setattr(LoopbackTransport, "send", send_by_host)
    return sent


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The devices of all that forwards and backwards are given."""
    found: set[str] = set()

    def note(payloads: Iterable[Payload | None]) -> None:
        found.update(str(leaf.device) for p in payloads if p is not None for leaf in p.leaves if leaf is not None)

    forward, backward = StageRunner.forward, StageRunner.backward

    def noted_forward(self: StageRunner, m: int, given: Payload | None) -> Payload:
        note([given])
        return forward(self, m, given)

    def noted_backward(self: StageRunner, kind: str, m: int, given: Payload | None, also: Any = ()) -> Payload:
        note([given])
        found.update(str(gradient.device) for _, gradient in also)
        return backward(self, kind, m, given, also)

    monkeypatch.setattr(StageRunner, "forward", noted_forward)
    monkeypatch.setattr(StageRunner, "backward", noted_backward)
    return found


def program(graph: ps.schedule.StageGraph) -> ps.Schedule:
    return ps.Program(ps.placements.circular(2, 4), 8, stages=graph).build()


SCHEDULES = {
    "one pipeline": lambda: ps.build("1f1b", 4, 8),
    "a split backward": lambda: ps.build("zb-v", 2, 8),
    "two pipelines": lambda: ps.build("chimera", 4, 8),
    "two pipelines with updates": lambda: ps.build("amdp", 4, 8, window=4),
    "one pipeline with updates": lambda: ps.build("pipedream-2bw", 4, 8, window=4),
    "a stage that feeds two": lambda: program(FORK),
    "a stage that joins microbatches": lambda: program(FEWER),
}


TIES = {"untied": (), "two tied": (0, -1), "three tied": (0, 1, -1)}
CASES = [
    (name, sharding, ties)
    for name in SCHEDULES
    for sharding in ("copies", "none")
    for ties in TIES
    if sharding == "copies" or name == "two pipelines with updates"  # what goes back to copies differs there alone
    if ties == "untied" or name != "a stage that joins microbatches"  # tied stages have microbatches of one size
]


@pytest.mark.parametrize(
    ("name", "sharding", "ties"), others_nightly(CASES, [c for c in CASES if c[2] != "two tied"])
)
def test_what_comes_in_host_memory_meets_its_stage_on_the_stages_device(
    name: str,
    sharding: str,
    ties: str,
    by_host_memory: list[int],
    received: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two whole steps. Once, gradients that another pipeline's copy sent to an update stayed in host memory, and so
    did one of several gradients that were added up before the stage had them."""
    monkeypatch.setattr(step_end, "_values", lambda losses: [0.0] * len(losses))  # there are none
    schedule = SCHEDULES[name]()
    model = [Block() for _ in range(schedule.num_stages)]
    for stage in TIES[ties]:
        model[stage].up.weight = model[0].up.weight
    batch = torch.zeros(16, WIDTH), torch.zeros(16, WIDTH)
    with ps.Pipeline(
        model,
        schedule,
        loss_fn=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        precision=ps.PrecisionOptions(clip_norm=0.05 if schedule.updates else None),
        parallel=ps.ParallelOptions(device=META, sharding=sharding),
    ) as pipe:
        for _ in range(2):
            pipe.step(*batch)
        assert {str(p.device) for _, p in pipe.named_parameters()} == {"meta"}
        assert all(p.grad is None or p.grad.device == META for _, p in pipe.named_parameters())
    assert sum(by_host_memory) > 0
    assert received == {"meta"}


def test_what_lies_on_the_device_is_not_copied() -> None:
    there = Payload([torch.zeros(2), None, torch.zeros(3)], 0, [True, False, False])
    assert on_device(torch.device("cpu"), there) is there
    moved = on_device(META, there)
    assert [None if leaf is None else str(leaf.device) for leaf in moved.leaves] == ["meta", None, "meta"]
    assert (moved.skeleton, moved.needs_grad) == (there.skeleton, there.needs_grad)
