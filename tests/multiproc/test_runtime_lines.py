"""A line a channel, as NCCL needs it, run over gloo on the processor: the same numbers as through tags."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import penstock as ps
from device_queues import stand_in_for_nccl
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.process_mesh import KEEPS_ORDER
from penstock.runtime.transport.nccl import lines_of
from penstock.runtime.transport.wiring import wire
from penstock.schedule import Op, Schedule, declare_shown_order
from plain_loop import differences, gradients, plain_step
from processes import run_ranks, run_ranks_to_end
from runtime_cases import mlp

pytestmark = pytest.mark.multiproc


class Tied(nn.Module):
    """The last layer, with the first one's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.t())


def tied_model(num_stages: int) -> nn.Sequential:
    torch.manual_seed(3)
    first = nn.Linear(8, 8, bias=False)
    return nn.Sequential(first, *(mlp() for _ in range(num_stages)), Tied(first.weight))


def through_lines(rank: int, names: Sequence[str], nodes: Sequence[int]) -> dict[str, list[str]]:
    made, found = stand_in_for_nccl(), {}
    mesh = ps.runtime.device_mesh(ps.Mesh(len(nodes), nodes=tuple(nodes)))
    for name in names:
        schedule = ps.build(name, len(nodes), 8)
        plain, model = tied_model(schedule.num_stages), tied_model(schedule.num_stages)
        pipe = ps.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, transport="nccl", mesh=mesh)
        wrong = []
        for step, rows in enumerate((19, 26, 19), start=1):  # shapes that come and go
            torch.manual_seed(step)
            x, y = torch.randn(rows, 8), torch.randn(rows, 8)
            loss = plain_step(plain, x, y, 8, nn.functional.mse_loss, step=step)
            if not torch.equal(pipe.step(x, y, update=False).loss, loss):
                wrong.append(f"the loss of step {step}")
        want = gradients(plain)
        mine = {n: None if p.grad is None else p.grad.clone() for n, p in pipe.named_parameters()}
        found[name] = wrong + differences({n: want[n] for n in mine}, mine)
        pipe.evaluate(x, y)
        pipe.close()
    assert len(made) == len(names)
    return found


@pytest.mark.slow
def test_lines_carry_every_schedule() -> None:
    names = ["1f1b", "interleaved-1f1b", "zb-v", "zb"]
    outcomes = run_ranks_to_end(4, through_lines, names, range(4))
    assert [o.value for o in outcomes] == [{name: [] for name in names}] * 4


@pytest.mark.skipif(not KEEPS_ORDER, reason="this torch sorts the processes of every group")
def test_lines_between_ranks_whose_processes_are_in_another_order() -> None:
    """Torch sorts the two processes of a line, and each end took itself for the other one."""
    outcomes = run_ranks_to_end(2, through_lines, ["1f1b"], [1, 0])
    assert [o.value for o in outcomes] == [{"1f1b": []}] * 2


def test_lines_refuse_stages_that_disagree_on_the_order() -> None:
    rows = [
        [Op("F", 0, 0), Op("F", 0, 1), Op("B", 0, 0), Op("B", 0, 1)],
        [Op("F", 1, 1), Op("F", 1, 0), Op("B", 1, 0), Op("B", 1, 1)],
    ]
    schedule = declare_shown_order(Schedule.of("crossed", ps.build("1f1b", 2, 2).placement, rows, 2))
    ps.check(schedule)
    with pytest.raises(RuntimeFailure, match="stage 0 sends microbatches in another order than stage 1 takes them"):
        lines_of(wire(schedule))


def without_a_gpu(rank: int) -> str:
    with pytest.raises(RuntimeFailure) as caught:
        ps.Pipeline(nn.Sequential(mlp(), mlp()), ps.build("1f1b", 2, 4), transport="nccl")
    return str(caught.value)


def test_nccl_is_refused_without_a_gpu() -> None:
    texts = [o.value for o in run_ranks(2, without_a_gpu)]
    assert texts == ["transport 'nccl' needs stages on a GPU, they are on cpu; use transport='host'"] * 2
