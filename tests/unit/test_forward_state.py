"""State that forwards change: a step leaves it as a plain loop does, or `pipe.verify` finds the broken contract."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from plain_loop import differences, gradients
from recomputed import with_recompute

pytestmark = pytest.mark.unit


class Codebook(nn.Module):
    """Scales by a moving average of its inputs, which it changes before it is used."""

    def __init__(self, change: Callable[[Codebook, Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("beside", torch.zeros(4))
        self.held, self.kept = [self.beside], torch.zeros(4)
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self, 0.9 * self.mean + 0.1 * x.mean(0))
        return self.linear(x) * self.mean * self.weight


def assign(it: Codebook, new: Tensor) -> None:
    it.mean = new


def copy_to_data(it: Codebook, new: Tensor) -> None:
    it.mean.data.copy_(new)


def assign_data(it: Codebook, new: Tensor) -> None:
    it.mean.data = new


def scale_data_of_weight(it: Codebook, new: Tensor) -> None:
    it.weight.data.mul_(0.9)


def scale_data_of_linear(it: Codebook, new: Tensor) -> None:
    it.linear.weight.data.mul_(0.9)


def scale_weight(it: Codebook, new: Tensor) -> None:
    it.weight.mul_(0.9)


def count(it: Codebook, new: Tensor) -> None:
    it.count = getattr(it, "count", 1) + 1  # type: ignore[assignment]
    it.mean = it.mean * it.count


def draw(it: Codebook, new: Tensor) -> None:
    it.mean = torch.full((4,), random.random())


def nothing(it: Codebook, new: Tensor) -> None:
    pass


def keep(it: Codebook, new: Tensor) -> None:
    it.kept = new


def average_in_an_attribute(it: Codebook, new: Tensor) -> None:
    it.kept = 0.9 * it.kept + 0.1 * new


def add_by_another_name(it: Codebook, new: Tensor) -> None:
    it.held[0].add_(new)


def add_every_second_time(it: Codebook, new: Tensor) -> None:
    if it.mean[0] < 0.9:  # after a while
        it.beside.data.add_(new)
    it.mean = it.mean * 0.95


def differing(change: Callable[[Codebook, Tensor], None], repeats: bool) -> list[str]:
    """What differs from the plain loop after two steps."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(4, 4), Codebook(change), nn.Tanh(), Codebook(change)))
    piped, plain = models
    schedule = ps.build("1f1b", 2, 4)
    x, loss_fn = torch.randn(8, 4), nn.MSELoss()
    with ps.Pipeline(piped, with_recompute(schedule) if repeats else schedule, loss_fn=loss_fn) as pipe:
        for _ in range(2):
            pipe.step(x, x, update=False)
            for part in x.chunk(4):
                (loss_fn(plain(part), part) / 4).backward()
    found = differences(gradients(list(plain)), gradients(list(piped)))
    return found + [name for name, b in piped.named_buffers() if not torch.equal(b, plain.get_buffer(name))]


@pytest.mark.parametrize(
    ("change", "repeats"),
    [
        (assign, False), (assign, True), (copy_to_data, True), (nothing, True), (keep, False), (keep, True),
        (average_in_an_attribute, False),
    ],
)  # fmt: skip
def test_state_that_a_contract_allows_is_that_of_the_plain_loop(
    change: Callable[[Codebook, Tensor], None], repeats: bool
) -> None:
    assert not differing(change, repeats)


@pytest.mark.parametrize(
    ("change", "repeats", "sentence"),
    [
        (copy_to_data, False, 2),
        (assign_data, False, 2),
        (scale_data_of_weight, False, 2),
        (scale_data_of_linear, False, 2),
        (scale_data_of_weight, True, 1),
        (scale_weight, True, 1),
        (add_by_another_name, True, 1),
        (add_every_second_time, True, 1),
        (count, True, 1),
        (draw, True, 1),
    ],
)
def test_state_that_breaks_the_contract_is_found_by_verify(
    change: Callable[[Codebook, Tensor], None], repeats: bool, sentence: int
) -> None:
    """Changes through `.data` between a forward and its backward, and state that R finds or leaves otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Codebook(change), nn.Tanh(), Codebook(change))
    schedule, x = ps.build("1f1b", 2, 4), torch.randn(8, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        ps.Pipeline(model, with_recompute(schedule) if repeats else schedule, loss_fn=nn.MSELoss()) as pipe,
        pytest.raises(ps.VerifyError) as raised,
    ):
        pipe.verify(x, x)
    found = next(each for each in raised.value.verification.comparisons if each.outcome == "differs")
    assert found.sentence == sentence, str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "nothing lasts"


class Largest(nn.Module):
    """Divides by the largest value so far, which it notes where autograd does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if (now := x.detach().abs().max()) > self.largest:
            self.largest.data.copy_(now)
        return self.linear(x) / self.largest.clone()


def test_a_buffer_that_the_first_forward_of_a_later_step_left_as_it_was_was_not_kept() -> None:
    """Only that forward's changes were looked for in each step, so R found what a later microbatch had made of it."""
    torch.manual_seed(0)
    model = nn.Sequential(Largest(), nn.Linear(4, 4))
    plain, loss_fn = copy.deepcopy(model), nn.MSELoss()
    with ps.Pipeline(model, with_recompute(ps.build("1f1b", 2, 4)), loss_fn=loss_fn) as pipe:
        for scale in (1.0, 8.0):
            x = torch.randn(8, 4) * torch.tensor([0.1, 0.1, *[scale] * 6])[:, None]
            pipe.step(x, x, update=False)
            for part in x.chunk(4):
                (loss_fn(plain(part), part) / 4).backward()
    assert not differences(gradients(list(plain)), gradients(list(model)))
    assert torch.equal(model[0].largest, plain[0].largest)


def test_a_weight_that_a_second_run_leaves_as_it_is() -> None:
    """An embedding with a largest norm shortens its rows in place, once."""
    model, plain = (nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Linear(4, 4)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    tokens, y, loss_fn = torch.randint(0, 9, (8,)), torch.randn(8, 4), nn.MSELoss()
    with ps.Pipeline(model, with_recompute(ps.build("1f1b", 2, 4)), loss_fn=loss_fn) as pipe:
        pipe.step(tokens, y, update=False)
    for part, target in zip(tokens.chunk(4), y.chunk(4), strict=True):
        (loss_fn(plain(part), target) / 4).backward()
    assert not differences(gradients(list(plain)), gradients(list(model)))
    assert torch.equal(model[0].weight, plain[0].weight)


class Teacher(nn.Module):
    """Follows a student by a moving average of its weights, which autograd sees."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 6)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
            target = self.teacher(x)
        return self.student(x) - target


def test_a_moving_average_in_place_is_that_of_the_plain_loop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Teacher(), nn.Linear(6, 6))
    plain, x, y = copy.deepcopy(model), torch.randn(8, 6), torch.randn(8, 6)
    with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss()) as pipe:
        pipe.step(x, y, update=False)
    for x_m, y_m in zip(x.chunk(4), y.chunk(4), strict=True):
        (nn.MSELoss()(plain(x_m), y_m) / 4).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def quantized() -> nn.Sequential:
    """Linear layers whose weights and outputs go through fake quantizers, as before training for 8 bits."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4)))
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(model)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "recomputed"])
@pytest.mark.filterwarnings("ignore")  # torch has moved this elsewhere, and says so
def test_bug_fake_quantizers_that_size_their_buffers_in_the_first_forward_could_not(name: str) -> None:
    """A digest of their buffers had fixed the size of these."""
    model, plain = quantized(), quantized()
    schedule = with_recompute(ps.build("1f1b", 2, 4)) if name == "recomputed" else ps.build(name, 2, 4)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    sgd = optimizer(plain.parameters())
    with ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), optimizer=optimizer) as pipe:
        for step in range(2):
            torch.manual_seed(step)
            x, y = torch.randn(8, 6), torch.randn(8, 6)
            pipe.step(x, y)
            for x_m, y_m in zip(x.chunk(4), y.chunk(4), strict=True):
                (nn.MSELoss()(plain(x_m), y_m) / 4).backward()
            sgd.step()
            sgd.zero_grad()
    found, want = model.state_dict(), plain.state_dict()
    assert not [name for name, value in want.items() if not torch.equal(value, found[name])]
