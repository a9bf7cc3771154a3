"""`pipe.evaluate(loader)`: its mean is that of all samples together, as a plain loop on the whole model has it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps
from loss_forms import PAD, RIGHT, WIDTH, batch_of, model_of
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.stage.loss import adds_up
from tiers import others_nightly

pytestmark = pytest.mark.unit

SIZES = (11, 8, 5)
"""Samples of each batch: the last is smaller than the others."""
WHOLE = [name for name, form in RIGHT.items() if form.is_whole and isinstance(form.targets(2), Tensor)]
SCHEDULES = ("1f1b", "zb-v", "chimera")
FORMS = [(name, schedule) for name in WHOLE for schedule in SCHEDULES]
BY_DAY = [(name, SCHEDULES[number % 3]) for number, name in enumerate(WHOLE)]
"""Of each form of a loss, the one schedule under which it is evaluated by day."""


@pytest.mark.parametrize(("name", "schedule"), others_nightly(FORMS, BY_DAY))
def test_the_mean_is_that_of_all_samples_in_one_piece(name: str, schedule: str) -> None:
    form, plan = RIGHT[name], ps.build(schedule, 2, 4)
    model, loss_fn = model_of(form, plan.num_stages), form.make()
    batches = [batch_of(form, size, seed) for seed, size in enumerate(SIZES)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        want = copy.deepcopy(loss_fn)(nn.Sequential(*copy.deepcopy(model)).eval()(x), y)
    want = want / len(batches) if adds_up(loss_fn) else want
    with ps.Pipeline(model, plan, loss_fn=loss_fn) as pipe:
        found = pipe.evaluate(iter(batches))
        assert torch.allclose(found.loss.float(), want, rtol=1e-5)
        assert found.losses.shape == (len(batches),)
        assert torch.allclose(found.losses.sum(), found.loss)
        assert torch.equal(found.window_losses, found.loss[None])


def test_a_plain_mean_of_the_batches_would_be_another_number() -> None:
    form = RIGHT["cross entropy of padding"]
    batches = [batch_of(form, size, seed) for seed, size in enumerate(SIZES)]
    with ps.Pipeline(model_of(form), ps.build("1f1b", 2, 4), loss_fn=form.make()) as pipe:
        each = torch.stack([pipe.evaluate(*batch).loss for batch in batches]).double()
        counts = torch.tensor([float((y != PAD).sum()) for _, y in batches]).double()
        found = pipe.evaluate(iter(batches)).loss
    assert torch.allclose(found, (each * counts).sum() / counts.sum())
    assert not torch.allclose(found, each.mean(), rtol=1e-4)


class Dropped(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def test_a_dataloader_is_a_loader_and_dropout_is_off() -> None:
    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(21, WIDTH)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    with ps.Pipeline(copy.deepcopy(model), ps.build("zb-h1", 2, 4), loss_fn=nn.MSELoss()) as pipe:
        found = pipe.evaluate(DataLoader(data, batch_size=8)).loss
        assert pipe.num_steps == 0
    with torch.no_grad():
        want = nn.MSELoss()(model.eval()(x), x.sum(1, keepdim=True))
    assert torch.allclose(found.float(), want)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.first(a) + self.second(b))


def test_a_dataloader_may_give_two_inputs() -> None:
    """torch's default_collate makes lists of tuples, and the two inputs were taken for two microbatches."""
    a, b, y = torch.randn(16, WIDTH), torch.randn(16, WIDTH), torch.randn(16, 1)
    data = [((a[k], b[k]), y[k]) for k in range(16)]
    stages = [Two(), nn.Linear(8, 1)]
    with ps.Pipeline(copy.deepcopy(stages), ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss()) as pipe:
        found = pipe.evaluate(DataLoader(data, batch_size=8)).loss
    with torch.no_grad():
        want = nn.MSELoss()(stages[1](stages[0](a, b)), y)
    assert torch.allclose(found.float(), want)


def test_a_batch_in_which_nothing_counts_weighs_nothing() -> None:
    form = RIGHT["cross entropy of padding"]
    x, y = batch_of(form)
    empty = torch.full_like(y, PAD)
    with ps.Pipeline(model_of(form), ps.build("1f1b", 2, 4), loss_fn=form.make()) as pipe:
        alone = float(pipe.evaluate(x, y).loss)
        assert float(pipe.evaluate(iter([(x, empty), (x, y)])).loss) == alone
        assert float(pipe.evaluate(iter([(x, empty)])).loss) == 0.0


class Own(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.last(self.first(x).tanh()) - y).square().mean()}


def test_a_model_that_returns_its_loss_is_given_mappings() -> None:
    torch.manual_seed(0)
    model = Own()
    batches = [{"x": torch.randn(n, WIDTH), "y": torch.randn(n, 1)} for n in SIZES]
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in ("x", "y")}
    want = copy.deepcopy(model)(**whole)["loss"].detach()
    with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=lambda output, targets: output["loss"]) as pipe:
        assert torch.allclose(pipe.evaluate(iter(batches)).loss.float(), want)


def test_a_loader_without_a_batch_is_refused() -> None:
    def spent() -> Iterator[Any]:
        yield from ()

    with (
        ps.Pipeline(Dropped(), ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss()) as pipe,
        pytest.raises(RuntimeFailure, match="a loader without a batch; give one"),
    ):
        pipe.evaluate(spent())


def test_bug_a_loader_of_two_inputs_beside_the_targets_ended_in_an_error_about_the_model() -> None:
    one, targets = torch.randn(8, WIDTH), torch.randn(8, 1)
    with (
        ps.Pipeline(Dropped(), ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss()) as pipe,
        pytest.raises(RuntimeFailure, match=r"3 values for a batch; give two, .* as in \(\(ids, mask\), targets\)"),
    ):
        pipe.evaluate(DataLoader(TensorDataset(one, one, targets), batch_size=4))


def test_a_dataset_is_refused_with_the_loader_that_it_needs() -> None:
    data = TensorDataset(torch.randn(8, WIDTH), torch.randn(8, 1))
    with ps.Pipeline(Dropped(), ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss()) as pipe:
        with pytest.raises(
            RuntimeFailure,
            match=r"inputs is a TensorDataset; give batches: wrap it in a DataLoader\(dataset, batch_size=\.\.\.\)",
        ):
            pipe.evaluate(data)
        assert pipe.evaluate(DataLoader(data, batch_size=4)).losses.shape == (2,)
