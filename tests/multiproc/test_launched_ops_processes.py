"""Between processes, on a device that runs ops later than their functions return: every transport, the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from device_queues import LateQueue, stand_in_for_nccl
from packed import packed
from penstock.runtime.execute import torch_backend
from penstock.runtime.transport.gloo import GlooTransport
from plain_loop import plain_step
from processes import run_ranks, run_ranks_to_end

pytestmark = pytest.mark.multiproc

CASES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"transport": "host"}),
    ("1f1b", {"transport": "gloo"}),
    ("zb-v", {"transport": "gloo", "dispatch": "dynamic"}),
    ("zb-v", {"transport": "direct"}),
    ("1f1b", {"transport": "delegate"}),
    ("zb", {"transport": "host", "dispatch": "hinted", "links": ps.Links({(0, 1): 3.0})}),
    ("1f1b", {"transport": "gloo", "tied": [("0.weight", "6.weight")]}),
    ("1f1b", {"transport": "nccl"}),
    ("zb-v", {"transport": "nccl", "dispatch": "dynamic"}),
    ("interleaved-1f1b", {"transport": "nccl", "dispatch": "hinted", "links": ps.Links({(0, 1): 3.0})}),
    ("1f1b", {"transport": "nccl", "dispatch": "dynamic", "tied": [("0.weight", "6.weight")]}),
]
"""What carries messages wakes the rank when an op has ended, each in its own way."""


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(6, 6), nn.GELU()]
    return nn.Sequential(*layers)


def build_batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(17, 6), torch.randn(17, 6)


def late_queue(device: torch.device) -> LateQueue:
    return LateQueue(watches=True)


def train(rank: int) -> list[tuple[dict[str, Any], int, int]]:
    torch_backend.queue_of = late_queue
    made = stand_in_for_nccl()
    found = []
    for name, options in CASES:
        model, schedule = build_model(), ps.build(name, 2, 8)
        with ps.Pipeline(model, schedule, **packed(loss_fn=nn.MSELoss(), **options)) as pipe:
            loss = pipe.step(*build_batch(), update=False).loss
            grads = {key: p.grad.tolist() for key, p in pipe.named_parameters() if p.grad is not None}
            found.append(({"loss": loss.item(), **grads}, len(pipe.timeline().ops), schedule.num_ops))
    assert len(made) == sum(options.get("transport") == "nccl" for _, options in CASES)
    assert all(lines.num_looks >= lines.num_waits > 0 for lines in made)
    return found


@pytest.mark.slow
def test_every_transport_gives_the_bits_of_the_plain_loop() -> None:
    outcomes = run_ranks_to_end(2, train)
    for place, (name, options) in enumerate(CASES):
        model = build_model()
        if "tied" in options:
            model[6].weight = model[0].weight
        loss = plain_step(model, *build_batch(), 8, nn.MSELoss())
        expected = {key: p.grad.tolist() for key, p in model.named_parameters() if p.grad is not None}
        found = {key: value for o in outcomes for key, value in o.value[place][0].items()}
        assert found.pop("loss") == loss.item(), name
        assert {key: found[key] for key in expected} == expected, (name, options)
        assert {o.value[place][1] for o in outcomes} == {outcomes[0].value[place][2]}


def leave_whole(stage: nn.Module, mesh: Any) -> None:
    """Both shards hold all of a stage: what matters here is who waits for whom."""


MESHES = (
    ((2, 2, 1), "none", "host"),
    ((2, 2, 1), "fsdp", "host"),
    ((2, 1, 2), "none", "host"),
    ((2, 2, 1), "none", "nccl"),
)


def train_in_a_mesh(rank: int) -> tuple[list[float], list[int]]:
    """Replicas, whose gradients are summed by asynchronous ops; and shards, whose collectives the host waits for."""
    torch_backend.queue_of = late_queue
    stand_in_for_nccl()
    losses, most = [], []
    for shape, sharding, transport in MESHES:
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
        options = packed(
            loss_fn=nn.MSELoss(), sharding=sharding, dispatch="dynamic", parallelize=leave_whole, transport=transport
        )
        with ps.Pipeline(
            build_model(),
            ps.build("1f1b", 2, 4),
            mesh=mesh,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            **options,
        ) as pipe:
            losses += [pipe.step(*build_batch()).loss.item() for _ in range(2)]
            most.append(pipe._local.devices._most_ahead)
    return losses, most


def plain_losses() -> list[float]:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(plain_step(model, *build_batch(), 8, nn.MSELoss()).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
def test_meshes_train_and_wait_for_each_op_where_its_collectives_stop_the_host() -> None:
    outcomes = run_ranks_to_end(4, train_in_a_mesh)
    for outcome in outcomes:
        losses, most = outcome.value
        assert losses == pytest.approx(plain_losses() * len(MESHES), rel=1e-5)
        assert most == [2, 1, 1, 2]


def frozen_gloo_is_woken(rank: int) -> bool:
    """Threads wait for messages, though dispatch is frozen: a wait of gloo's own would end for no mark."""
    torch_backend.queue_of = late_queue
    with ps.Pipeline(build_model(), ps.build("1f1b", 2, 4), **packed(loss_fn=nn.MSELoss(), transport="gloo")) as pipe:
        pipe.step(*build_batch(), update=False)
        transport = pipe._local.transport
        assert isinstance(transport, GlooTransport)
        return transport._threaded


def test_a_frozen_rank_is_woken_too() -> None:
    outcomes = run_ranks(2, frozen_gloo_is_woken)
    assert [o.value for o in outcomes] == [True, True], "\n".join(o.text for o in outcomes)
