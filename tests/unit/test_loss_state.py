"""A loss that is a module with buffers: each microbatch changes them once, and a checkpoint has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.train.settings import Settings
from penstock.train.tasks.own import OwnTask
from recomputed import with_recompute

pytestmark = pytest.mark.usefixtures("one_thread")


class Balanced(nn.Module):
    """Divides a loss by the average of those before, in a buffer that is replaced, and counts, in one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        loss, before = (output - targets).square().mean(), self.mean
        self.mean = 0.5 * before + 0.5 * loss.detach()
        self.calls += 1
        return loss / before

    def balance(self, output: Tensor, targets: Tensor) -> Tensor:
        return self(output, targets)


FORMS: dict[str, Callable[[Balanced], Any]] = {
    "the module": lambda loss: loss,
    "its method": lambda loss: loss.balance,
    "a partial of it": lambda loss: partial(loss),
}


def model_and_batches() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    return model, [(torch.randn(16, 8), torch.randn(16, 8)) for _ in range(4)]


def in_a_plain_loop(model: nn.Module, loss: Balanced, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [
        (loss(model(x), y) / 4).detach()
        for inputs, targets in batches
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True)
    ]


@pytest.mark.parametrize("with_r", [False, True], ids=["kept", "run again"])
@pytest.mark.parametrize("form", FORMS)
def test_each_microbatch_changes_a_loss_once(form: str, with_r: bool) -> None:
    model, batches = model_and_batches()
    loss, plain = Balanced(), Balanced()
    schedule = ps.build("1f1b", 2, 4)
    want = in_a_plain_loop(copy.deepcopy(model), plain, batches)
    with ps.Pipeline(model, with_recompute(schedule) if with_r else schedule, loss_fn=FORMS[form](loss)) as pipe:
        found = [pipe.step(*batch).losses for batch in batches]
    assert torch.equal(torch.cat(found), torch.stack(want))
    assert loss.calls == 16
    assert torch.equal(loss.mean, plain.mean)


def test_a_run_goes_on_with_the_buffers_of_its_loss(tmp_path: Path) -> None:
    model, batches = model_and_batches()
    found = []
    for is_resumed in (False, True):
        mine, loss = copy.deepcopy(model), Balanced()
        losses = []
        for parts in (batches[:2], batches[2:]):
            with ps.Pipeline(
                mine, ps.build("zb-h1", 2, 4), loss_fn=loss, optimizer=partial(torch.optim.SGD, lr=0.1)
            ) as pipe:
                if is_resumed and losses:
                    pipe.load(tmp_path)
                losses += [pipe.step(*batch).losses for batch in parts]
                if is_resumed:
                    pipe.save(tmp_path)
                    mine, loss = copy.deepcopy(model), Balanced()
        found.append(torch.cat(losses))
    assert torch.equal(*found)


def test_a_checkpoint_of_another_loss_is_loaded_as_before(tmp_path: Path) -> None:
    model, (batch, *_) = model_and_batches()
    with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss()) as pipe:
        pipe.step(*batch)
        pipe.save(tmp_path)
    with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=Balanced()) as pipe:
        pipe.load(tmp_path)
        pipe.save(tmp_path, number=5)
    with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss()) as pipe:
        pipe.load(tmp_path)


NET = """
import torch
from torch import nn

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, targets):
        self.calls += 1
        return (output - targets).square().mean()

Net, loss_fn = nn.Sequential(nn.Linear(4, 1)), Counting()

def data(train=True):
    return torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 1))
"""


def test_a_run_begins_with_a_loss_as_its_file_makes_it(tmp_path: Path) -> None:
    file = tmp_path / "net_of_loss.py"
    file.write_text(NET)
    settings = Settings(model=f"{file}:Net", data=f"{file}:data", ranks=1, microbatches=2, batch=4)
    task = OwnTask(settings, ps.build("gpipe", 1, 2))
    task.read(None)
    assert task.loss.calls == 0  # tried on the first microbatch
