"""Row 1: `CrossEntropyLoss(ignore_index=-100)` over uneven padding gave 2.060 where the batch has 2.065."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from loss_forms import (
    NUM_TOKENS,
    PAD,
    RIGHT,
    WIDTH,
    WRONG,
    Form,
    batch_of,
    hidden_padding,
    model_of,
    of_whole,
    padded,
    tokens,
    values,
)
from penstock.runtime.errors import RuntimeFailure
from penstock.train.inputs import SharedLoss
from plain_loop import differences, gradients, plain_step

ONE_PIPELINE = ps.build("1f1b", 2, 4)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_that_of_the_whole_batch(name: str) -> None:
    form = RIGHT[name]
    model, loss_fn = model_of(form), form.make()
    x, y = batch_of(form)
    plain, own = copy.deepcopy(model), copy.deepcopy(loss_fn)
    with ps.Pipeline(model, ONE_PIPELINE, loss_fn=loss_fn) as pipe:
        found = pipe.step(x, y, update=False)
        assert torch.equal(found.loss, plain_step(plain, x, y, 4, own))
        assert differences(gradients(plain), gradients(model)) == []
        if form.is_whole:
            loss, wanted = of_whole(model, x, y, own)
            assert torch.allclose(pipe.evaluate(x, y).loss, loss)
            assert torch.allclose(found.loss, loss)
            for one, other in zip(gradients(model).values(), wanted, strict=True):
                assert one is not None
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_wrong_loss_is_told_in_the_first_step(name: str) -> None:
    form = WRONG[name]
    x, y = batch_of(form, 12)
    ways_out = r"weight\(targets\).*adds_up = True.*reduction=\"sum\".*by_microbatch = True"
    with (
        ps.Pipeline(model_of(form), ONE_PIPELINE, loss_fn=form.make()) as pipe,
        pytest.raises(RuntimeFailure, match=rf"(?s)loss_fn gives .* for microbatches 0 and 1 together.*{ways_out}"),
    ):
        pipe.step(x, y)
    assert all(p.grad is None for p in pipe.parameters())


def test_a_difference_of_two_thousandths_is_told_with_both_numbers() -> None:
    """The row's own: as much padding as makes 2.060 of 2.065."""
    logits = torch.randn(8, 64, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(5, (8, 64), generator=torch.Generator().manual_seed(1))
    targets[0, 50:] = -100
    own = [hidden_padding(logits[m : m + 4], targets[m : m + 4]).item() for m in (0, 4)]
    whole = hidden_padding(logits, targets).item()
    assert 0 < abs(sum(own) / 2 - whole) < 0.002 * whole
    with (
        ps.Pipeline([nn.Identity(), Free()], ps.build("1f1b", 2, 2), loss_fn=hidden_padding) as pipe,
        pytest.raises(RuntimeFailure) as caught,
    ):
        pipe.step(logits, targets)
    for number in (*own, whole, sum(own) / 2):
        assert f"{number:.6g}" in str(caught.value)
    assert "output float32 [4, 64, 5] and targets int64 [4, 64]" in str(caught.value)


class Free(nn.Module):
    """Passes on what it gets, to which a number is added that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.added


WEIGHTS = torch.tensor([1.0, 2.0, 8.0])


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float64, False), *itertools.product([torch.bfloat16, torch.float16], [False, True])],
)
@pytest.mark.parametrize("name", ["cross entropy of padding", "squares", "terms that cancel", "binary, of logits"])
def test_types_of_few_digits_are_no_mistake(dtype: torch.dtype, autocast: bool, name: str) -> None:
    form = RIGHT[name]
    for seed in range(4):
        model = nn.ModuleList(model_of(form)).to(torch.float32 if autocast else dtype)
        x, y = batch_of(form, seed=seed)
        x, y = (x, y) if autocast else (x.to(dtype), y.to(dtype) if y.is_floating_point() else y)
        precision = ps.PrecisionOptions(autocast=dtype if autocast else None)
        with ps.Pipeline([*model], ONE_PIPELINE, loss_fn=form.make(), precision=precision) as pipe:
            assert pipe.step(x, y).loss.isfinite()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_and_a_mistake_is_told_in_them(dtype: torch.dtype) -> None:
    form = WRONG["padding hidden in a function"]
    model = nn.ModuleList(model_of(form)).to(dtype)
    x, y = batch_of(form)
    with (
        ps.Pipeline([*model], ONE_PIPELINE, loss_fn=hidden_padding) as pipe,
        pytest.raises(RuntimeFailure, match="together"),
    ):
        pipe.step(x.to(dtype), y)


def test_class_weights_that_a_function_hides_are_told() -> None:
    """They are of float32, so that the loss can't be computed in float64."""
    form = RIGHT["class weights"]

    def hidden(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight=WEIGHTS)

    x, y = batch_of(form)
    with ps.Pipeline(model_of(form), ONE_PIPELINE, loss_fn=hidden) as pipe, pytest.raises(RuntimeFailure):
        pipe.step(x, torch.arange(11) // 4)
    known = partial(F.cross_entropy, weight=WEIGHTS)
    with ps.Pipeline(model_of(form), ONE_PIPELINE, loss_fn=known) as pipe:
        assert torch.allclose(pipe.step(x, y).loss, of_whole(model_of(form), x, y, known)[0])


def test_a_loss_that_is_no_longer_torchs_own_is_not_taken_for_it() -> None:
    """One whose forward is replaced on the object: its samples count, and not what torch's would ignore."""
    loss_fn: Any = nn.CrossEntropyLoss()
    loss_fn.forward = lambda output, target: (output.mean() - 1).square()
    with ps.Pipeline(model_of(RIGHT["cross entropy"]), ONE_PIPELINE, loss_fn=loss_fn) as pipe:
        x, y = batch_of(RIGHT["cross entropy"])
        with pytest.raises(RuntimeFailure, match=r"come to .*, weighed 0\.5 to 0\.5"):
            pipe.step(x, y.clamp(max=1) - 100)


def test_lists_of_other_lengths_are_weighed_by_their_elements() -> None:
    torch.manual_seed(0)
    model = [nn.Linear(4, 4), nn.Linear(4, 4)]
    xs = [torch.randn(2, length, 4) for length in (3, 7, 1, 5)]
    ys = [torch.randn_like(x) for x in xs]
    with ps.Pipeline(model, ONE_PIPELINE, loss_fn=nn.MSELoss()) as pipe:
        found = pipe.step(xs, ys, update=False).loss
    errors = [(nn.Sequential(*model)(x) - y).square().flatten() for x, y in zip(xs, ys, strict=True)]
    assert torch.allclose(found, torch.cat(errors).mean())


# What the check leaves alone.


def calls_of(schedule: ps.Schedule, shape: Callable[[Tensor], Any], make: Callable[[int], Tensor]) -> list[int]:
    """How many samples each call of the loss was given, in two steps and an evaluation."""
    seen = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(len(target))
        return output.square().mean() + 0 * target.float().mean()

    form = Form(lambda: loss_fn, shape, make)
    x, y = batch_of(form, 8)
    with ps.Pipeline(model_of(form), schedule, loss_fn=loss_fn) as pipe:
        pipe.step(x, y)
        pipe.step(x, y)
        pipe.evaluate(x, y)
    return seen


def test_it_costs_one_call_in_the_first_step() -> None:
    assert calls_of(ps.build("1f1b", 2, 4), values, padded) == [2, 2, 4] + [2] * 10
    assert calls_of(ps.build("1f1b", 2, 1), values, padded) == [8] * 3


def test_outputs_that_can_not_be_joined_are_left_out() -> None:
    whole = calls_of(ps.build("1f1b", 2, 4), lambda x: tokens(x).transpose(0, 1), padded)  # [T, B, V]
    assert whole == [2] * 12


def test_random_numbers_that_the_loss_draws_are_the_plain_loops() -> None:
    """The call that checks puts the generators back, and takes no dropout for a mistake."""
    form = RIGHT["dropout"]
    model, (x, y) = model_of(form), batch_of(form)
    plain = copy.deepcopy(model)
    with ps.Pipeline(model, ONE_PIPELINE, loss_fn=form.make()) as pipe:
        for step in (1, 2):
            assert torch.equal(pipe.step(x, y, update=False).loss, plain_step(plain, x, y, 4, form.make(), step=step))


def test_a_loss_with_a_count_of_its_own_is_left_out() -> None:
    """It gives another value when it is called again, so that nobody knows what the batch's would be."""
    calls = iter(range(100))

    def annealed(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * (1 + next(calls))

    form = RIGHT["squares"]
    x, y = batch_of(form)
    with ps.Pipeline(model_of(form), ONE_PIPELINE, loss_fn=annealed) as pipe:
        assert pipe.step(x, y).loss > 0


def test_a_loss_that_takes_no_other_number_of_samples_is_left_out() -> None:
    def of_two(output: Tensor, target: Tensor) -> Tensor:
        first, second = output - target
        return (first.square() + second.square()).mean() / 2

    form = RIGHT["squares"]
    x, y = batch_of(form, 8)
    with ps.Pipeline(model_of(form), ONE_PIPELINE, loss_fn=of_two) as pipe:
        assert torch.allclose(pipe.step(x, y, update=False).loss, of_whole(model_of(form), x, y, F.mse_loss)[0])


@pytest.mark.parametrize("name", ["chimera", "amdp", "zb-v", "gpipe"])
def test_it_looks_at_whatever_order_a_schedule_has(name: str) -> None:
    form = WRONG["a sum"]
    schedule = ps.build(name, 2, 8)
    model = model_of(form, schedule.num_stages)
    x, y = batch_of(form, 16)
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1)} if schedule.updates is not None else {}
    with (
        ps.Pipeline(model, schedule, loss_fn=form.make(), **options) as pipe,
        pytest.raises(RuntimeFailure, match="It looks like a sum"),
    ):
        pipe.step(x, y)
    with ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), **options) as pipe:
        assert pipe.step(x, y).loss > 0


def test_a_loss_that_is_shared_by_passes_is_weighed_as_it_is() -> None:
    """`penstock train` divides a loss by the number of passes that fill a window."""
    for name, form in RIGHT.items():
        if not form.is_whole:
            continue
        model, (x, y), loss_fn = model_of(form), batch_of(form), form.make()
        with ps.Pipeline(model, ONE_PIPELINE, loss_fn=SharedLoss(loss_fn, 2)) as pipe:
            found = pipe.step(x, y, update=False).loss
        assert torch.allclose(found, of_whole(model, x, y, loss_fn)[0] / 2), name
    form = RIGHT["a contrast within each"]
    with ps.Pipeline(model_of(form), ONE_PIPELINE, loss_fn=SharedLoss(form.make(), 2)) as pipe:
        assert pipe.step(*batch_of(form)).loss > 0


@pytest.mark.slow
def test_a_compiled_loss_is_not_compiled_for_two_microbatches() -> None:
    form = RIGHT["squares"]
    made: list[int] = []

    def backend(module: torch.fx.GraphModule, given: list[Tensor]) -> Callable[..., Any]:
        made.append(len(given[0]))
        return module.forward

    loss_fn = torch.compile(F.mse_loss, backend=backend)
    x, y = batch_of(form, 8)
    with ps.Pipeline(model_of(form), ONE_PIPELINE, loss_fn=loss_fn) as pipe:
        assert torch.allclose(pipe.step(x, y, update=False).loss, of_whole(model_of(form), x, y, F.mse_loss)[0])
    assert made == [2]


class TokensInFront(nn.Module):
    """[B, T] to [T, B, V], as recurrent layers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.table(ids).transpose(0, 1)
        return found


def test_targets_with_samples_in_another_dimension_or_whole() -> None:
    """Those are not joined, and these are given whole to the call that checks."""

    def by_sample(output: Tensor, target: Any) -> Tensor:
        """A mean over samples of the mean over each one's tokens."""
        mask = target["tokens"] != PAD
        each = F.cross_entropy(output.movedim(2, 1), target["tokens"].clamp(min=0), reduction="none") * mask
        return (each.sum(0) / mask.sum(0)).mean() * target["scale"].sum()

    targets = {"tokens": padded(8).T.contiguous(), "scale": torch.tensor([0.5, 1.5])}
    torch.manual_seed(0)
    ids, model = torch.randint(8, (8, NUM_TOKENS)), TokensInFront()
    rules = ps.BatchRules(targets={"tokens": 1, "scale": ps.WHOLE})
    with ps.Pipeline([model], ps.build("1f1b", 1, 4), loss_fn=by_sample, batch=rules) as pipe:
        assert torch.allclose(pipe.step(ids, targets, update=False).loss, by_sample(model(ids), targets))

    def weighted(output: Tensor, target: Any) -> Tensor:
        return ((output - target["y"]).square() * target["each"]).mean()

    form = RIGHT["squares"]
    x, y = batch_of(form, 8)
    both = {"y": y, "each": torch.rand(WIDTH)}
    rules = ps.BatchRules(targets={"each": ps.WHOLE})
    for loss_fn, fails in ((weighted, False), (lambda *given: weighted(*given).sqrt(), True)):
        raising = pytest.raises(RuntimeFailure, match="together") if fails else nullcontext()
        with ps.Pipeline(model_of(form), ONE_PIPELINE, loss_fn=loss_fn, batch=rules) as pipe, raising:
            pipe.step(x, both)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "chimera"])
@pytest.mark.parametrize("masked", [(0,), (3,), (0, 1), (1, 2), (2, 3)])
def test_a_microbatch_in_which_no_target_counts_is_told_wherever_it_comes(
    schedule: str, masked: tuple[int, ...]
) -> None:
    """The first two counted alike, so nothing was compared after them, and all weights became nan."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 5, WIDTH), torch.randint(3, (8, 5))
    for m in masked:
        y[2 * m : 2 * m + 2] = -100
    model = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    with (
        ps.Pipeline(model, ps.build(schedule, 2, 4), loss_fn=hidden_padding, optimizer=torch.optim.SGD) as pipe,
        pytest.raises(RuntimeFailure, match=r"loss_fn gives [0-9.]+ for .* nan.*weight\(targets\)"),
    ):
        pipe.step(x, y)
    assert all(p.isfinite().all() for stage in model for p in stage.parameters())


def test_targets_that_are_no_numbers_are_not_the_loss_s_mistake_and_later_steps_compare_nothing() -> None:
    x, y = torch.randn(8, WIDTH), torch.randn(8, 3)
    y[7], calls = torch.nan, []

    def counted(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        return F.mse_loss(output, target)

    with ps.Pipeline([nn.Linear(WIDTH, 3)], ps.build("1f1b", 1, 4), loss_fn=counted) as pipe:
        assert pipe.step(x, y, update=False).loss.isnan()
        calls.clear()
        pipe.step(x, y, update=False)
    assert calls == [2] * 4
