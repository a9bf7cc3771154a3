"""Losses as people write them: forms that are right, and forms that train another loss than that of the batch.

Each is a loss, what the last layer makes of its numbers, and targets. Samples have uneven lengths, so that
microbatches of as many samples have unlike numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps

WIDTH, NUM_CLASSES, NUM_TOKENS, PAD = 12, 3, 4, -100
NUM_SAMPLES = 11
WEIGHTS = torch.tensor([0.5, 1.0, 4.0])
"""Of classes: numbers whose sums have no rounding."""


@dataclass(frozen=True)
class Form:
    """A loss, and what it is given.

    Attributes:
        make: gives the loss.
        shape: makes the output of numbers[B, WIDTH].
        targets: by their number makes targets of that many samples, which may be cut.
        is_whole: whether the batch has a loss of its own, which the microbatches' come to.
        may_repeat: whether the loss of a forward that runs again (R) is the same.
    """

    make: Callable[[], Any]
    shape: Callable[[Tensor], Any]
    targets: Callable[[int], Any]
    is_whole: bool = True
    may_repeat: bool = True


class Shaped(nn.Module):
    """A layer whose output has some form."""

    def __init__(self, shape: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.shape = nn.Linear(WIDTH, WIDTH), shape

    def forward(self, x: Tensor) -> Any:
        return self.shape(self.linear(x))


def model_of(form: Form, num_stages: int = 2) -> list[nn.Module]:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages - 1)]
    return [*layers, Shaped(form.shape)]


def batch_of(form: Form, num: int = NUM_SAMPLES, seed: int = 0) -> tuple[Tensor, Any]:
    torch.manual_seed(seed)
    return torch.randn(num, WIDTH), form.targets(num)


def of_whole(model: list[nn.Module], x: Tensor, y: Any, loss_fn: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss of the batch in one piece, and its gradients; 0 where nothing in it counts."""
    loss = loss_fn(nn.Sequential(*model)(x), y)
    parameters = list(nn.ModuleList(model).parameters())
    if loss.isnan():
        return torch.zeros(()), [torch.zeros_like(p) for p in parameters]
    return loss.detach(), list(torch.autograd.grad(loss, parameters))


# Outputs.


def values(x: Tensor) -> Tensor:
    return x


def tokens(x: Tensor) -> Tensor:
    """[B, T, V]"""
    return x.view(-1, NUM_TOKENS, NUM_CLASSES)


def classes_first(x: Tensor) -> Tensor:
    """[B, V, T]"""
    return tokens(x).mT


def classes(x: Tensor) -> Tensor:
    """[B, V]"""
    return x[:, :NUM_CLASSES]


def log_shares(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.chunk(2, -1)


def column(x: Tensor) -> Tensor:
    """[B, 1]"""
    return x[:, :1]


# Targets.


def numbers(num: int) -> Tensor:
    return torch.randn(num, WIDTH)


def growing(num: int) -> Tensor:
    """Numbers that are larger in later samples."""
    return torch.randn(num, WIDTH) * torch.arange(1, num + 1)[:, None]


def uneven_labels(num: int) -> Tensor:
    return torch.arange(num) // 2 % NUM_CLASSES


def shares(num: int) -> Tensor:
    return torch.rand(num, WIDTH)


def distributions(num: int) -> Tensor:
    return torch.randn(num, WIDTH).softmax(-1)


def signs(num: int) -> Tensor:
    return torch.randn(num, WIDTH).sign()


def labels(num: int) -> Tensor:
    return torch.arange(num) * 7 % NUM_CLASSES


def padded(num: int) -> Tensor:
    """Tokens of samples that are longer and longer, up to one that is whole."""
    found = torch.randint(NUM_CLASSES, (num, NUM_TOKENS))
    lengths = 1 + torch.arange(num) * 5 % NUM_TOKENS
    return found.where(torch.arange(NUM_TOKENS) < lengths[:, None], PAD)


def partly_masked(num: int) -> Tensor:
    """The same, with nothing in the first samples, which are a microbatch."""
    found = padded(num)
    found[: num // 3 + 1] = PAD
    return found


def soft(num: int) -> Tensor:
    return torch.randn(num, NUM_CLASSES).softmax(-1)


def single(num: int) -> Tensor:
    return torch.randn(num)


def some_labels(num: int) -> Tensor:
    """Of each sample the classes that it has, and -1 behind them."""
    return torch.tensor([[0, 2, -1], [1, -1, -1]] * num)[:num]


# Losses.


class FlatTokens(nn.CrossEntropyLoss):
    """Torch's, for [B, T, V]; hides what its mean is over."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output.flatten(0, 1), target.flatten())


class Named(nn.CrossEntropyLoss):
    """Torch's, by another name."""


class Counted:
    """A mean over tokens, which says so; of no tokens 0/0."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return FlatTokens()(output, target)

    def weight(self, target: Tensor) -> int:
        return int((target != PAD).sum())


class CountedTokens(nn.Module):
    """A module around torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = FlatTokens()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        mean: Tensor = self.loss(output, target)
        return mean

    def weight(self, target: Tensor) -> Tensor:
        return (target != PAD).sum()


class Wrongly(Counted):
    """Counts samples, and is a mean over tokens."""

    def weight(self, target: Tensor) -> int:
        return len(target)


class Shares(nn.Module):
    """Shares of the batch's loss, divided by its size."""

    adds_up = True

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum() / (NUM_SAMPLES * WIDTH)


class AddedMeans(Shares):
    """Means that are added up."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()


class Contrast:
    """Each sample against the others beside it."""

    by_microbatch = True

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output @ target.T, torch.arange(len(output)))


class DroppingOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.drop(output), target)


class Centered(nn.Module):
    """Keeps a running mean, from which the loss is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output - self.center, target)
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        self.calls += 1
        return loss


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def gaussian(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    mean, logs = output
    return nn.GaussianNLLLoss()(mean, target[:, : mean.shape[1]], logs.exp())


def cosine(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cosine_embedding_loss(*output, target.sign())


def advantage(output: Tensor, target: Tensor) -> Tensor:
    """A mean of terms that all but cancel each other, as those of a policy's gradient do."""
    return (output * (target - target.mean(-1, keepdim=True))).mean()


def in_place(output: Tensor, target: Tensor) -> Tensor:
    return (output * 1.0).sub_(target).square_().mean()


def by_name(output: Any, target: Any) -> Tensor:
    return F.mse_loss(output["y"], target["y"])


def hidden_padding(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PAD)


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    mask = target != PAD
    each = F.cross_entropy(output.mT, target.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum()


def dice(output: Tensor, target: Tensor) -> Tensor:
    p = output.sigmoid()
    return 1 - 2 * (p * target).sum() / (p.sum() + target.sum())


def correlation(output: Tensor, target: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(output.flatten() - output.mean(), target.flatten() - target.mean(), dim=0)


def balanced(output: Tensor, target: Tensor) -> Tensor:
    """Class weights from what the batch has."""
    counts = torch.bincount(target, minlength=NUM_CLASSES) + 1.0
    return F.cross_entropy(output, target, weight=1 / counts)


def spread(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + output.std(0).mean()


RIGHT: Mapping[str, Form] = {
    "cross entropy": Form(nn.CrossEntropyLoss, classes, labels),
    "cross entropy of padding": Form(nn.CrossEntropyLoss, classes_first, padded),
    "cross entropy of masked microbatches": Form(nn.CrossEntropyLoss, classes_first, partly_masked),
    "another index to ignore": Form(lambda: nn.CrossEntropyLoss(ignore_index=1), classes, labels),
    "class weights": Form(lambda: nn.CrossEntropyLoss(WEIGHTS), classes, labels),
    "class weights and padding": Form(lambda: nn.CrossEntropyLoss(WEIGHTS), classes_first, partly_masked),
    "smoothed labels": Form(lambda: nn.CrossEntropyLoss(label_smoothing=0.2), classes_first, partly_masked),
    "smoothed, weighed, padded": Form(
        lambda: nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), classes_first, partly_masked
    ),
    "probabilities of classes": Form(lambda: nn.CrossEntropyLoss(WEIGHTS), classes, soft),
    "a sum of cross entropies": Form(lambda: nn.CrossEntropyLoss(reduction="sum"), classes_first, partly_masked),
    "negative log-likelihood": Form(
        lambda: nn.NLLLoss(WEIGHTS, ignore_index=0), lambda x: log_shares(classes(x)), labels
    ),
    "squares": Form(nn.MSELoss, values, numbers),
    "a sum of squares": Form(lambda: nn.MSELoss(reduction="sum"), values, numbers),
    "absolute": Form(nn.L1Loss, values, numbers),
    "smooth absolute": Form(nn.SmoothL1Loss, values, numbers),
    "huber": Form(lambda: nn.HuberLoss(delta=0.5), values, numbers),
    "binary": Form(nn.BCELoss, Tensor.sigmoid, shares),
    "binary, of logits": Form(lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), values, shares),
    "divergence over elements": Form(nn.KLDivLoss, log_shares, distributions),
    "divergence over samples": Form(lambda: nn.KLDivLoss(reduction="batchmean"), log_shares, distributions),
    "a sum of divergences": Form(lambda: nn.KLDivLoss(reduction="sum"), log_shares, distributions),
    "poisson": Form(nn.PoissonNLLLoss, values, shares),
    "soft margin": Form(nn.SoftMarginLoss, values, signs),
    "hinge": Form(nn.HingeEmbeddingLoss, values, signs),
    "margins of classes": Form(nn.MultiMarginLoss, classes, labels),
    "margins of labels": Form(nn.MultiLabelMarginLoss, classes, some_labels),
    "soft margins of labels": Form(nn.MultiLabelSoftMarginLoss, values, lambda num: (signs(num) + 1) / 2),
    "a function of torch": Form(lambda: F.cross_entropy, classes_first, partly_masked),
    "keywords": Form(
        lambda: partial(F.cross_entropy, weight=WEIGHTS, ignore_index=2, label_smoothing=0.1), classes, labels
    ),
    "a sum by keyword": Form(lambda: partial(F.mse_loss, reduction="sum"), values, numbers),
    "a mean over samples by keyword": Form(
        lambda: partial(F.kl_div, reduction="batchmean"), log_shares, distributions
    ),
    "gaussian, in a function": Form(lambda: gaussian, pair, numbers),
    "cosine, in a function": Form(lambda: cosine, pair, single),
    "a mean of its own": Form(lambda: mean_square, values, numbers),
    "terms that cancel": Form(lambda: advantage, values, numbers),
    "in place": Form(lambda: in_place, values, numbers),
    "dicts": Form(lambda: by_name, lambda x: {"y": x}, lambda num: {"y": numbers(num)}),
    "another name": Form(Named, classes_first, partly_masked),
    "a module that counts": Form(CountedTokens, tokens, partly_masked),
    "an object that counts": Form(Counted, tokens, partly_masked),
    "penstock's": Form(ps.models.CrossEntropy, tokens, partly_masked),
    "shares": Form(Shares, values, numbers),
    "a contrast within each": Form(Contrast, values, numbers, is_whole=False),
    "dropout": Form(DroppingOut, values, numbers, is_whole=False),
    "a running mean": Form(Centered, values, numbers, is_whole=False, may_repeat=False),
}

WRONG: Mapping[str, Form] = {
    "padding hidden in a function": Form(lambda: hidden_padding, tokens, padded),
    "a microbatch in which nothing counts, hidden": Form(lambda: hidden_padding, tokens, partly_masked),
    "padding hidden in a subclass": Form(FlatTokens, tokens, padded),
    "a masked mean": Form(lambda: masked_mean, tokens, padded),
    "another weight than its own": Form(Wrongly, tokens, padded),
    "a sum": Form(lambda: lambda output, target: (output - target).square().sum(), values, numbers),
    "means that are added up": Form(AddedMeans, values, numbers),
    "a root of a mean": Form(lambda: lambda output, target: F.mse_loss(output, target).sqrt(), values, growing),
    "a perplexity": Form(lambda: lambda output, target: F.cross_entropy(9 * output, target).exp(), classes, labels),
    "a maximum": Form(lambda: lambda output, target: (output - target).abs().max(), values, numbers),
    "a median": Form(lambda: lambda output, target: (output - target).abs().median(), values, numbers),
    "a contrast": Form(
        lambda: lambda output, target: F.cross_entropy(output @ target.T, torch.arange(len(output))), values, numbers
    ),
    "dice": Form(lambda: dice, values, lambda num: growing(num).sigmoid()),
    "a correlation": Form(lambda: correlation, values, numbers),
    "class weights of the batch": Form(lambda: balanced, classes, uneven_labels),
    "a spread over samples": Form(lambda: spread, values, numbers),
    "[B, 1] beside [B]": Form(nn.MSELoss, column, single),
}
