"""What a step that is repeated after a lost link begins from, and what is left of it afterwards."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from link_runs import INTERFACES, TIMEOUT, cutting
from penstock.runtime.adapt import agent
from penstock.runtime.adapt import store as adapt_store
from penstock.runtime.transport.repeat import GuardedGroup
from processes import run_ranks, run_ranks_to_end
from waiting import wait_until

pytestmark = pytest.mark.multiproc


def pipeline_of(model: Any, loss_fn: Callable[..., Tensor] | None = None, **more: Any) -> Any:
    """A pipeline of two ranks, which know of two interfaces."""
    os.environ["PENSTOCK_INTERFACES"] = INTERFACES
    given: dict[str, Any] = {"schedule": ps.build("1f1b", 2, 4), "optimizer": torch.optim.SGD, "transport": "gloo"}
    given |= {"loss_fn": loss_fn or nn.MSELoss(), "timeout": TIMEOUT, **more}
    return ps.Pipeline(model, given.pop("schedule"), **given)


def in_place_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target.sub_(1.0))


def step_in_place(rank: int, is_cut: bool) -> tuple[list[Tensor], int, bool]:
    """The losses and gradients of a step whose first layer and loss change the batch in place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LeakyReLU(0.5, inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    cuts = [(1, "sending", 3, False)] if is_cut else []
    with pipeline_of(model, in_place_loss) as pipe, cutting(rank, pipe, cuts):
        x = torch.randn(16, 8)
        y = x.sum(1, keepdim=True)
        before = x.clone()
        losses = pipe.step(x, y, update=False).losses
        gradients = [p.grad.clone() for p in pipe.parameters()]
        return [losses, *gradients], pipe._local.attempts.num_repeats, torch.equal(x, before)


def test_a_repeated_step_began_from_a_batch_that_was_changed_in_place() -> None:
    usual, repeated = run_ranks(2, step_in_place, False), run_ranks(2, step_in_place, True)
    assert [o.code for o in (*usual, *repeated)] == [0] * 4, "\n".join(o.text for o in (*usual, *repeated))
    for one, other in zip(usual, repeated, strict=True):
        assert (one.value[1:], other.value[1:]) == ((0, True), (1, True))
        assert all(map(torch.equal, one.value[0], other.value[0]))


class Balanced(nn.Module):
    """Divides a loss by the moving average of those before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss, before = nn.functional.mse_loss(output, target), self.mean
        self.mean = 0.5 * before + 0.5 * loss.detach()
        return loss / before


def steps_with_a_loss_of_state(rank: int, folder: str) -> tuple[Tensor, Tensor, int]:
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), Balanced()
    cuts = [(1, "sending", 3, False)] if folder.endswith("cut") else []
    with pipeline_of(model, loss) as pipe, cutting(rank, pipe, cuts):
        x = torch.randn(16, 8)
        losses = pipe.step(x, x.sum(1, keepdim=True)).losses
        pipe.save(folder)
        return losses, loss.mean, pipe._local.attempts.num_repeats


def test_a_loss_was_left_with_what_a_given_up_step_had_made_of_its_buffers(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("whole", "cut")]
    usual, repeated = (run_ranks(2, steps_with_a_loss_of_state, folder) for folder in folders)
    assert [o.code for o in (*usual, *repeated)] == [0] * 4, "\n".join(o.text for o in (*usual, *repeated))
    assert (usual[1].value[2], repeated[1].value[2]) == (0, 1)
    for one, other in zip(usual, repeated, strict=True):
        assert torch.equal(one.value[0], other.value[0])
        assert torch.equal(one.value[1], other.value[1])
    (_, kept, _), loss = usual[1].value, Balanced()  # of the process that has the last stage
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    with ps.Pipeline(model, ps.build("gpipe", 1, 4), loss_fn=loss, optimizer=torch.optim.SGD) as pipe:
        pipe.load(folders[0])
    assert torch.equal(loss.mean, kept)


def loads_after_a_loss(rank: int, folder: str) -> tuple[float, float, str]:
    torch.manual_seed(0)
    schedule, x = ps.build("pipedream", 2, 4, window=1), torch.randn(16, 4)
    mesh = ps.runtime.device_mesh(ps.Mesh(pp=2, dp=2))
    stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
    with pipeline_of(stages, schedule=schedule, transport="host", mesh=mesh) as pipe:
        pipe.step(x, x[:, :1])
        pipe.save(folder)
        first = float(pipe.step(x, x[:, :1]).loss)
        pipe.load(folder)
        with cutting(rank, pipe, [(1, "summing", 2, False)]), pytest.raises(ps.runtime.PeerLost) as caught:
            pipe.step(x, x[:, :1])
        pipe.load(folder)
        return first, float(pipe.step(x, x[:, :1]).loss), str(caught.value)


def test_messages_of_a_step_that_was_given_up_came_in_the_next_after_a_load(tmp_path: Path) -> None:
    outcomes = run_ranks_to_end(4, loads_after_a_loss, str(tmp_path))
    for first, again, said in (o.value for o in outcomes):
        assert first == again
        assert "it can't be repeated" in said


def keys_that_stay(rank: int) -> list[int]:
    """How much a process keeps of all that others have told, after more and more steps."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    mesh, x, found = ps.runtime.device_mesh(ps.Mesh(pp=2, dp=2)), torch.randn(16, 8), []
    with pipeline_of(model, mesh=mesh, precision=ps.PrecisionOptions(clip_norm=1.0)) as pipe:
        for _ in range(4):
            for _ in range(10):
                pipe.step(x, x)
            found.append(len(pipe._local.attempts.failover.beats._known))
    return found


@pytest.mark.slow
def test_processes_kept_all_that_groups_of_others_told() -> None:
    outcomes = run_ranks_to_end(4, keys_that_stay)
    for _, second, _, fourth in (o.value for o in outcomes):
        assert fourth <= second + 10


def verifies_after_a_loss(rank: int) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(16, 8)
    with pipeline_of(model) as pipe:
        pipe.step(x, x)
        failover = pipe._local.attempts.failover
        if rank == 0:
            failover.want(1, "the test says so")
        wait_until(lambda: failover.number == 1, lambda: "no group of number 1 was made")
        assert pipe.verify(x, x).holds
        with cutting(rank, pipe, [(1, "receiving", 3, False)]):
            assert pipe.verify(x, x).holds
        return int(pipe._local.attempts.num_repeats)


def test_verify_ended_a_training_that_had_lost_a_link() -> None:
    outcomes = run_ranks(2, verifies_after_a_loss)
    assert [o.value for o in outcomes] == [1, 1], "\n".join(o.text for o in outcomes)


def compares_clocks_over_a_loss(rank: int, is_lost: bool) -> tuple[list[float], int, int]:
    """Each rank believes to be a host of its own. A connection breaks while rank 1 asks what rank 0's clock shows."""
    adapt_store.clock_name = lambda: f"host {rank}"
    agent.CLOCK_COMPARISON_ITERATIONS = 2
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(16, 8)
    usual, num_calls = GuardedGroup._watched, 0

    def watched(self: GuardedGroup, once: Callable[[Any], object]) -> None:
        nonlocal num_calls
        num_calls += 1
        usual(self, broken if is_lost and (rank, num_calls) == (1, 5) else once)

    def broken(group: Any) -> None:
        raise RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer")

    with pipeline_of(model, adapt=ps.AdaptOptions(may_delegate=False)) as pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr(GuardedGroup, "_watched", watched)
        losses = [float(pipe.step(x, x).loss) for _ in range(4)]
        return losses, pipe._local.attempts.num_repeats, pipe._local.attempts.failover.number


def test_a_link_that_was_lost_while_clocks_were_compared_ended_the_run() -> None:
    usual, lost = (run_ranks_to_end(2, compares_clocks_over_a_loss, is_lost) for is_lost in (False, True))
    assert [o.value[1:] for o in (*usual, *lost)] == [(0, 0)] * 2 + [(1, 1)] * 2
    assert [o.value[0] for o in usual] == [o.value[0] for o in lost]


def end_connections_of_torch() -> None:
    """As a host does whose first interface is gone: torch's own groups go by it."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family == socket.AF_INET and one.getpeername()[0] == one.getsockname()[0] == "127.0.0.1":
                one.shutdown(socket.SHUT_RDWR)


def clips_shards(rank: int, is_lost: bool) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(16, 8)
    mesh, schedule = ps.runtime.device_mesh(ps.Mesh(pp=1, dp=2)), ps.build("gpipe", 1, 2)
    parallel, precision = ps.ParallelOptions(sharding="fsdp"), ps.PrecisionOptions(clip_norm=0.1)
    with pipeline_of(model, schedule=schedule, mesh=mesh, parallel=parallel, precision=precision) as pipe:
        results = [pipe.step(x, x)]
        if is_lost and rank == 0:
            end_connections_of_torch()
            pipe._local.attempts.failover.want(1, "the test says so")
        results += [pipe.step(x, x) for _ in range(2)]
        return [float(each.loss) for each in results], [float(each.grad_norm) for each in results]


@pytest.mark.slow
def test_clipping_of_shards_went_by_an_interface_that_was_gone() -> None:
    usual, lost = run_ranks(2, clips_shards, False), run_ranks(2, clips_shards, True)
    assert [o.code for o in (*usual, *lost)] == [0] * 4, "\n".join(o.text for o in (*usual, *lost))
    assert [o.value for o in usual] == [o.value for o in lost]
    plain = run_ranks(2, clips_plainly)
    assert [o.value for o in plain] == [o.value for o in usual], "\n".join(o.text for o in plain)


def clips_plainly(rank: int) -> tuple[list[float], list[float]]:
    """With one interface, where torch's own sums are used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "INTERFACES", "")
        return clips_shards(rank, False)
