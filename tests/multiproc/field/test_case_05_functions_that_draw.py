"""Case 5: stages as functions draw what they draw in one process, whatever the number of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from processes import run_ranks, run_ranks_to_end
from tiers import others_nightly
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

WIDTH = 5
calls: list[int] = []


class Called:
    """A function that makes a stage, and counts its calls."""

    def __init__(self, stage: int, kind: str) -> None:
        self.stage, self.kind = stage, kind

    def __call__(self) -> nn.Module:
        calls.append(self.stage)
        if self.kind == "still" and self.stage % 2:
            layer = nn.Linear(WIDTH, WIDTH, device="meta").to_empty(device="cpu")
            with torch.no_grad():
                for p in layer.parameters():
                    p.fill_(0.1)
            return layer
        if self.kind == "seeded":
            torch.manual_seed(self.stage)
        if self.kind == "uneven":  # draws more, the higher it is
            torch.rand(self.stage)
        return nn.Linear(WIDTH, WIDTH)


def stages(num: int, kind: str) -> list[Any]:
    """Of "mixed" every third one is a module, which draws when it is made."""
    found = [Called(stage, kind) for stage in range(num)]
    if kind != "mixed":
        return found
    return [nn.Linear(WIDTH, WIDTH) if stage % 3 == 1 else one for stage, one in enumerate(found)]


def plain(num: int, kind: str, seed: int) -> tuple[nn.Sequential, Tensor]:
    """The same modules made one after the other, and what is drawn next."""
    torch.manual_seed(seed)
    given = stages(num, kind)
    model = nn.Sequential(*(one if isinstance(one, nn.Module) else one() for one in given))
    return model, torch.rand(2)


def built(rank: int, schedule: str, pp: int, dp: int, kind: str, is_apart: bool) -> Any:
    """The weights of this process, what it draws next, and the stages whose functions were called."""
    calls.clear()
    order = ps.build(schedule, pp, 8 // dp)
    torch.manual_seed(7 + (rank if is_apart else 0))
    given = stages(order.num_stages, kind)
    mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp")) if dp > 1 else None
    with ps.Pipeline(given, order, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD, mesh=mesh) as pipe:
        after = torch.rand(2)
        x = torch.ones(16, WIDTH)
        pipe.step(x, x)
        return {n: p.detach().clone() for n, p in pipe.named_parameters()}, after, list(calls), dist.get_rank()


CASES = [
    ("1f1b", 2, 1, "linear"),
    ("1f1b", 4, 1, "linear"),
    ("interleaved-1f1b", 2, 1, "uneven"),
    ("zb-v", 2, 1, "mixed"),
    ("1f1b", 4, 1, "still"),
    ("chimera", 2, 1, "uneven"),
    ("1f1b", 2, 2, "uneven"),
    ("1f1b", 2, 1, "seeded"),
]
BY_DAY = [CASES[0], CASES[2], CASES[5]]


@pytest.mark.parametrize(("schedule", "pp", "dp", "kind"), others_nightly(CASES, BY_DAY))
def test_weights_are_those_of_one_process(schedule: str, pp: int, dp: int, kind: str) -> None:
    num = ps.build(schedule, pp, 8 // dp).num_stages
    model, after = plain(num, kind, 7)
    x = torch.ones(16, WIDTH)
    for part in x.chunk(8):
        (nn.MSELoss()(model(part), part) / 8).backward()
    torch.optim.SGD(model.parameters()).step()
    want = dict(model.named_parameters())
    for outcome in run_ranks_to_end(pp * dp, built, schedule, pp, dp, kind, False):
        found, next_draw, called, _ = outcome.value
        assert all(torch.allclose(value, want[name], atol=1e-6) for name, value in found.items())
        assert torch.equal(next_draw, after)
        assert max(map(called.count, called), default=0) <= 2
        assert kind != "still" or all(called.count(stage) == 1 for stage in called if stage % 2)


def test_the_generator_of_the_first_process_counts() -> None:
    _, after = plain(2, "linear", 7)
    first, second = run_ranks(2, built, "1f1b", 2, 1, "linear", True)
    alone, other = run_ranks(2, built, "1f1b", 2, 1, "linear", False)
    for one, two in ((first, alone), (second, other)):
        assert one.code == two.code == 0, one.text + two.text
        assert all(torch.equal(value, two.value[0][name]) for name, value in one.value[0].items())
        assert torch.equal(one.value[1], after)


class Fails(Called):
    """Fails the second time, when it is called from where it would be in one process."""

    def __call__(self) -> nn.Module:
        if self.stage in calls:
            raise ValueError("once is enough")
        return super().__call__()


def failing(rank: int) -> str:
    calls.clear()
    torch.manual_seed(0)
    given = [Called(0, ""), Fails(1, "")]
    try:
        ps.Pipeline(given, ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss(), timeout=PATIENCE)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def test_a_function_that_fails_the_second_time_ends_all_processes() -> None:
    first, second = run_ranks(2, failing)
    assert first.value == "PeerFailed: rank 1 could not build its stages: ValueError: once is enough"
    assert second.value == "ValueError: once is enough"
