"""The plain loop that is late by as much as PipeDream: its optimizers are torch's, its delay the pipeline's, and its
protocol asks for what it says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.amdp import delay
from experiments.amdp.delay import HELD_OUT, SEEDS, WAYS, Job, Loop, Way, lines, next_job
from experiments.amdp.delay_optimizers import (
    DelayCompensation,
    ErrorFeedback,
    Stepped,
    WeightVelocity,
    even_singular_values,
)
from experiments.amdp.learning import Method, Task, train
from penstock.runtime import MuonAdamW

pytestmark = pytest.mark.unit


def stepped(kind: str, optimizer: torch.optim.Optimizer, weights: list[Tensor], **options: Any) -> list[Tensor]:
    """Five steps of both on the same gradients; what the loop's has."""
    random = torch.Generator().manual_seed(1)
    mine = Stepped(kind, [weight.detach().clone() for weight in weights], **options)
    for rate in (0.01, 0.02, 0.02, 0.01, 0.005):
        gradients = [torch.randn(weight.shape, generator=random) for weight in weights]
        for group in optimizer.param_groups:
            group["lr"] = rate
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        mine.step(gradients, [rate] * len(weights))
    return mine.weights


def made() -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=random)) for shape in ((6, 4), (4, 6), (5,), (6, 4))]


def test_adamw_and_nadam_are_torchs() -> None:
    weights = made()
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.1)
    torch.testing.assert_close(stepped("AdamW", optimizer, [*weights]), [each.detach() for each in weights])
    weights = made()
    nadam: dict[str, Any] = {"betas": (0.99, 0.999), "weight_decay": 0.01, "decoupled_weight_decay": True}
    found = stepped("NAdam", torch.optim.NAdam(weights, momentum_decay=0.5, **nadam), [*weights], momentum_decay=0.5)
    torch.testing.assert_close(found, [each.detach() for each in weights])


def test_muon_is_the_products_but_for_bfloat16() -> None:
    weights = made()
    found = stepped("Muon", MuonAdamW(weights, weight_decay=0.1), [*weights])
    torch.testing.assert_close(found, [each.detach() for each in weights], rtol=0.0, atol=2e-3)
    moved = [float((one - other).detach().abs().max()) for one, other in zip(made(), weights, strict=True)]
    assert min(moved) > 2e-2, "the tolerance must be far below what a step moves"


def test_singular_values_become_even() -> None:
    matrices = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(even_singular_values(matrices))
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.3


def test_rotated_adam_sees_no_coordinates() -> None:
    """Turned gradients make it step by the turned steps, which Adam's own do not."""
    random = torch.Generator().manual_seed(2)
    left, right = (torch.linalg.qr(torch.randn(size, size, generator=random).double())[0] for size in (4, 3))
    gradients = [torch.randn(4, 3, generator=random).double() for _ in range(25)]
    off = {}
    for kind in ("Rotated", "AdamW"):
        plain, turned = torch.zeros(4, 3).double(), torch.zeros(4, 3).double()
        one, other = Stepped(kind, [plain]), Stepped(kind, [turned])
        for gradient in gradients:
            one.step([gradient], [0.01])
            other.step([left @ gradient @ right.mT], [0.01])
        off[kind] = float((turned - left @ plain @ right.mT).abs().max() / plain.abs().max())
    assert off["Rotated"] < 1e-6 < 1e-2 < off["AdamW"]


def test_errors_of_late_updates_are_made_up_for() -> None:
    """By hand: for a delay of one 2 s(t) - s(t - 1); all errors add up to the last updates, once more."""
    updates = [torch.tensor([each]) for each in (3.0, 5.0, -1.0, 2.0, 7.0)]
    feedback = ErrorFeedback([0, 1, 3])
    made = [[float(feedback.corrected(place, update)) for update in updates] for place in range(3)]
    assert made[0] == [3.0, 5.0, -1.0, 2.0, 7.0]
    assert made[1] == [6.0, 7.0, -7.0, 5.0, 12.0]
    assert made[2] == [6.0, 10.0, -2.0, 1.0, 9.0]
    assert [sum(each) - 16.0 for each in made] == [0.0, 7.0, 8.0]


def test_an_optimizer_feeds_back_what_it_steps_by_and_not_its_decay() -> None:
    gradients = [torch.randn(4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    plain, fed = (Stepped("AdamW", [torch.ones(4)], feedback=each) for each in (None, ErrorFeedback([1])))
    rates, found = (0.01, 0.02, 0.03), torch.ones(4)
    earlier = torch.zeros(4)
    for rate, gradient in zip(rates, gradients, strict=True):
        before = plain.weights[0].clone()
        plain.step([gradient], [rate])
        fed.step([gradient], [rate])
        update = before * (1 - rate * 0.1) - plain.weights[0]
        found = found * (1 - rate * 0.1) - (2 * update - earlier)
        earlier = update
        torch.testing.assert_close(fed.weights[0], found)


def test_a_gradient_is_moved_on_to_the_newest_weights() -> None:
    """By hand, for both kinds of lambda; one that is not late stays as it is."""
    gradient, moved = torch.tensor([2.0, -3.0]), torch.tensor([0.5, 0.1])
    square = torch.tensor([1.0, 4.0])
    constant = DelayCompensation(0.04, adaptive=False).compensated(gradient, moved, square.clone())
    torch.testing.assert_close(constant, torch.tensor([2.0 + 0.04 * 4 * 0.5, -3.0 + 0.04 * 9 * 0.1]))
    found = DelayCompensation(2.0).compensated(gradient, moved, square)
    torch.testing.assert_close(square, torch.tensor([0.95 * 1 + 0.05 * 4, 0.95 * 4 + 0.05 * 9]))
    by = [2.0 / math.sqrt(each + 1e-7) for each in (1.15, 4.25)]
    torch.testing.assert_close(found, torch.tensor([2.0 + by[0] * 4 * 0.5, -3.0 + by[1] * 9 * 0.1]))
    assert torch.equal(DelayCompensation(2.0).compensated(gradient, torch.zeros(2), square), gradient)


def test_constant_steps_are_undone_exactly() -> None:
    start = torch.tensor([1.0, -2.0]).double()
    step = torch.tensor([0.25, 0.5]).double()
    delays = (0, 1, 7)
    velocity = WeightVelocity([start] * 3, delays)
    for number in range(1, 301):
        velocity.update([start + number * step] * 3)
    for late, found in zip(delays, velocity.read(), strict=True):
        torch.testing.assert_close(found, start + (300 - late) * step, rtol=0.0, atol=1e-10)


def test_the_mean_of_how_weights_move_forgets_by_its_delay() -> None:
    """By hand: of a delay of two a tenth is left after two updates, of one after one."""
    velocity = WeightVelocity([torch.zeros(1)] * 2, [2, 1], decay=0.1)
    for place in (1.0, 3.0):
        velocity.update([torch.tensor([place])] * 2)
    kept = math.sqrt(0.1)
    mean = kept * (1 - kept) * 1.0 + (1 - kept) * 2.0
    torch.testing.assert_close(velocity.read()[0], torch.tensor([3.0 - 2 * mean]))
    torch.testing.assert_close(velocity.read()[1], torch.tensor([3.0 - (0.1 * 0.9 * 1.0 + 0.9 * 2.0)]))


@pytest.mark.parametrize(
    "way",
    [
        Way("", "AdamW", feeds_back=True),
        Way("", "AdamW", compensates=DelayCompensation(64.0)),
        Way("", "AdamW", corrects=True),
    ],
)
def test_what_mends_a_delay_does_nothing_without_one(way: Way) -> None:
    task = Task(delay.CONFIG, num_batches=8, every=8, warmup=2, samples=2, seed=3)
    losses = []
    for each in (way, Way("", "AdamW")):
        for late in (False, True):
            loop = Loop(replace(each, late=late), task, 4e-3)
            losses.append([loop.update(number) for number in range(4)])
    prompt, late, plain_prompt, plain_late = losses
    assert prompt == plain_prompt
    assert late[0] == plain_late[0]
    assert late != plain_late


@pytest.mark.parametrize("corrects", [False, True])
def test_backwards_read_what_their_way_says(corrects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward of a way that corrects reads nearly its forward's weights, and any other late one just these."""
    task = Task(delay.CONFIG, num_batches=40, every=40, warmup=2, samples=2, seed=3)
    loop = Loop(Way("", "AdamW", corrects=corrects), task, 1e-3)
    gaps = []

    def before(loss: Tensor) -> None:
        read = [parameter.detach().clone() for parameter in loop._parameters]
        gaps.append(
            [
                float((a - b).norm() / (c - b).norm().clamp(min=1e-12))
                for a, b, c, late in zip(read, forward, loop.weights, loop.delays, strict=True)
                if late
            ]
        )
        backward(loss)

    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", before)
    for number in range(12):
        forward = [reads[0].clone() for reads in loop._to_read]
        loop.update(number)
    last = max(gaps[-1])
    assert 0.0 < last < 0.9 if corrects else last == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("predicts", [False, True])
def test_its_delay_is_that_of_pipedreams_order(predicts: bool) -> None:
    """Eleven microbatches, each a window, through eight stages of the runtime."""
    task = Task(delay.CONFIG, num_batches=11, every=11, warmup=2, samples=32, seed=3)
    loop = Loop(Way("", "AdamW", predicts=predicts), task, 4e-3)
    losses = [loop.update(number) for number in range(11)]
    rule = "xpipe" if predicts else "pipedream"
    row = train(Method("", "pipedream", window=1, peak=4e-3, samples=32, rule=rule), task)
    assert row["mismatch"] == 7
    assert losses == pytest.approx(row["losses"], rel=1e-5)
    assert loop.evaluate() == pytest.approx(row["final"], rel=1e-5)


@pytest.mark.parametrize("every", [None, 1, 3])
def test_rates_are_lowered_by_stage_and_stages_are_late_as_the_way_says(every: int | None) -> None:
    task = Task(delay.CONFIG, num_batches=4, every=4, warmup=2, samples=2, seed=3)
    late, prompt = (Loop(Way("", "AdamW", at, every, by_stage=1.0), task, 4e-3) for at in (True, False))
    assert set(late.delays) == (set(range(8)) if every is None else {every})
    assert set(prompt.delays) == {0}
    assert late._rates(1) == prompt._rates(1)
    assert late._rates(1) == [task.rate(1, 4e-3) / (1 + each) for each in late.delays]
    losses = [[loop.update(number) for number in range(3)] for loop in (late, prompt)]
    assert losses[0][0] == losses[1][0], "both begin with the same weights"
    assert losses[0][1] != losses[1][1], "one of them has not seen the first update on all stages"


def carried_out(loss: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while (job := next_job(rows)) is not None:
        assert len(rows) < 500
        rows.append({"way": job.way, "seed": job.seed, "peak": job.peak, "final": loss(job)})
    return rows


def test_rates_come_from_a_seed_that_is_not_judged() -> None:
    best = {way.name: way.peak or way.first_peak / 8 for way in WAYS}
    rows = carried_out(lambda job: 2.0 + abs(job.peak - best[job.way]))
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way.name]
        assert sorted(row["seed"] for row in mine if row["seed"] != HELD_OUT) == list(SEEDS)
        assert {row["peak"] for row in mine if row["seed"] in SEEDS} == {best[way.name]}
        if way.peak is None:
            assert min(row["peak"] for row in mine) < best[way.name] < max(row["peak"] for row in mine)
        else:
            assert len(mine) == len(SEEDS)
    assert "the protocol is done" in list(lines(rows))[-1]


def test_a_run_that_diverges_counts_as_such() -> None:
    way = WAYS[1]
    rows: list[dict[str, Any]] = [{"way": way.name, "seed": HELD_OUT, "peak": way.first_peak, "final": None}]
    assert "diverged" in "\n".join(lines(rows))
    assert isinstance(next_job(rows), Job)
