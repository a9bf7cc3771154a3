"""What the plain loop that is late by as much as PipeDream steps by, would step by next, and is mended with.

    AdamW      m / (sqrt(v) + e)
    NAdam      Nesterov's momentum near one, vNAG's optimizer (Ajanthan et al. 2025, arXiv 2505.01099)
    Muon       0.2 sqrt(max(rows, columns)) NS(M) for hidden matrices, AdamW for the rest, as `runtime.MuonAdamW`
    Rotated    basis rotation (arXiv 2602.03515): Adam in the eigenbasis of the gradient's two covariances, which
               every tenth update turns by one QR step; AdamW for the rest. The first gradient says where these
               bases lie, and does not move the matrices

    ErrorFeedback        an update and its error are made: how it differs from the one made when it was due
    DelayCompensation    a gradient is moved on to the newest weights along its square, as along a Hessian's diagonal
    WeightVelocity       weights of earlier updates, from the newest and the mean of how they moved

Matrices of one shape are stepped together, and Muon's Newton-Schulz iterations run in float32: on a core without
bfloat16 that is three times as fast, and the loss is the same to 0.001.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.runtime.parameters.muon import is_hidden_matrix

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
TURN_EVERY, COVARIANCE = 10, 0.95
EPS = 1e-8


def even_singular_values(matrices: Tensor, steps: int = 5) -> Tensor:
    """Muon's Newton-Schulz iterations on a stack of matrices."""
    a, b, c = NEWTON_SCHULZ
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * (gram @ gram)) @ wide
    return wide.mT if matrices.shape[-2] > matrices.shape[-1] else wide


class ErrorFeedback:
    """Updates with the error of late ones, after the abstract of "delay-aware" Muon (arXiv 2606.30634).

    The abstract has "an optimizer-agnostic Error Feedback-inspired correction", for a delay of one; its text was not
    at hand. Here the update `s(t)` of a gradient whose weights are `d` updates old was due `d` updates ago, and
    `s(t - d)` was made then. The error of that goes into the update that is made now:

        s(t) + (s(t) - s(t - d))

    For a delay of one that is `2 s(t) - s(t - 1)`. The errors add up to the last `d` updates: the weights are always
    where all updates so far lead, and the last `d` of them once more. Before the first update nothing was made.

    Args:
        delays: of each weight.
    """

    def __init__(self, delays: Sequence[int]) -> None:
        self._made: list[deque[Tensor]] = [deque(maxlen=delay) for delay in delays]

    def corrected(self, place: int, update: Tensor) -> Tensor:
        """What is made instead of an update of the weight at `place`."""
        made = self._made[place]
        if not made.maxlen:
            return update
        error = update - made[0] if len(made) == made.maxlen else update
        made.append(update)
        return update + error


@dataclass(frozen=True)
class DelayCompensation:
    """Delay compensation of gradients (Zheng et al. 2017, arXiv 1609.08326): `g + lambda g g (newest - read)`.

    The square of the gradient stands for the diagonal of the Hessian. What each setting does, and the values of both
    that are customary, are as in the authors' published updaters and ports of them; the paper's text was not at hand.

    Args:
        strength: lambda, customarily 0.04; where `adaptive` lambda over its divisor, customarily 2.
        adaptive: lambda is divided by the root of the mean of the gradient's squares, whose weight falls by 0.95 an
            update, and which begins with 0.
    """

    strength: float
    adaptive: bool = True

    def compensated(self, gradient: Tensor, moved: Tensor, square: Tensor) -> Tensor:
        """A gradient, on weights that have `moved` since it read them; `square`, the mean, goes on in place."""
        square.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
        by = self.strength / (square + 1e-7).sqrt() if self.adaptive else self.strength
        return gradient + by * gradient * gradient * moved


class WeightVelocity:
    """PipeMare's discrepancy correction (Yang et al. 2019, arXiv 1910.05124): backwards on what forwards nearly read.

    As it is commonly described; the paper's text was not at hand. No old weights are kept. Of each weight there is
    the mean `v` of how far an update moves it, and `d` updates ago it is taken to have been `newest - d v`:

        v <- gamma v + (1 - gamma) (newest - the one before),    gamma = D^(1 / d),    D = e^-2

    Args:
        weights: as they are before the first update.
        delays: of each weight.
        decay: D.
    """

    def __init__(self, weights: Sequence[Tensor], delays: Sequence[int], decay: float = math.exp(-2)) -> None:
        self._newest = [weight.clone() for weight in weights]
        self._velocity = [torch.zeros_like(weight) for weight in weights]
        self._delays, self._kept = list(delays), [decay ** (1 / delay) if delay else 0.0 for delay in delays]

    def update(self, weights: Sequence[Tensor]) -> None:
        """The weights after an update."""
        each = zip(self._newest, self._velocity, weights, self._kept, strict=True)
        for newest, velocity, weight, kept in each:
            velocity.lerp_(weight - newest, 1 - kept)
            newest.copy_(weight)

    def read(self) -> list[Tensor]:
        """What forwards are taken to have read whose backwards come now."""
        each = zip(self._newest, self._velocity, self._delays, strict=True)
        return [newest - delay * velocity for newest, velocity, delay in each]


class Stepped:
    """Weights and the state of one optimizer over all of them.

    Args:
        kind: "AdamW", "NAdam", "Muon" or "Rotated".
        weights: stepped in place; marked as `mark_ends` does.
        momentum: of Muon.
        momentum_decay: of NAdam.
        feedback: of errors of late updates; weights decay without. None for none.
    """

    def __init__(
        self,
        kind: str,
        weights: Sequence[Tensor],
        momentum: float = 0.95,
        momentum_decay: float = 0.0,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self._feedback = feedback
        self.kind, self.weights, self._momentum, self._psi = kind, list(weights), momentum, momentum_decay
        self._betas = (0.99, 0.999) if kind == "NAdam" else (0.9, 0.95)
        self._decay = 0.01 if kind == "NAdam" else 0.1
        shapes: dict[tuple[int, ...], list[int]] = {}
        if kind in ("Muon", "Rotated"):
            for place, weight in enumerate(self.weights):
                if is_hidden_matrix(weight):
                    shapes.setdefault(tuple(weight.shape), []).append(place)
        self._stacks = list(shapes.values())
        stacked = {place for stack in self._stacks for place in stack}
        self._rest = [place for place in range(len(self.weights)) if place not in stacked]
        self._mean = [torch.zeros_like(weight) for weight in self.weights]
        self._square = [torch.zeros_like(weight) for weight in self.weights]
        self._bases: list[list[Tensor]] = []
        self._steps, self._product = 0, 1.0

    def step(self, gradients: Sequence[Tensor], rates: Sequence[float]) -> None:
        """An update, each weight at a rate of its own."""
        self._steps += 1
        self._product *= self._mu(self._steps)
        for place in self._rest:
            self._mean[place].lerp_(gradients[place], 1 - self._betas[0])
            self._add_square(place, gradients[place])
        lies = self.kind == "Rotated" and not self._bases
        if lies:
            self._bases = [_first_bases(_stacked(gradients, stack)) for stack in self._stacks]
        for number, stack in enumerate(() if lies else self._stacks):
            kept = self._momentum if self.kind == "Muon" else self._betas[0]
            for place in stack:
                self._mean[place].lerp_(gradients[place], 1 - kept)
            if self.kind == "Rotated":
                self._add_rotated(number, _stacked(gradients, stack))
        each = zip(self.weights, self._directions(gradients), rates, strict=True)
        for place, (weight, direction, rate) in enumerate(each):
            update = rate * direction
            if self._feedback is not None:
                update = self._feedback.corrected(place, update)
            weight.mul_(1 - rate * self._decay).sub_(update)
        if self._steps % TURN_EVERY == 0:
            for bases in self._bases:
                for side in (0, 1):
                    bases[2 + side] = torch.linalg.qr(bases[side] @ bases[2 + side])[0]

    def weights_after(self, gradients: Sequence[Tensor], rates: Sequence[float]) -> list[Tensor]:
        """Returns the weights that a step on these gradients would make; weights and state stay as they are."""
        other = copy.copy(self)
        other.weights = [weight.clone() for weight in self.weights]
        other._mean = [mean.clone() for mean in self._mean]
        other._square = [square.clone() for square in self._square]
        other._bases = [[side.clone() for side in bases] for bases in self._bases]
        other._feedback = copy.deepcopy(self._feedback)
        other.step(gradients, rates)
        return other.weights

    def next_directions(self) -> list[Tensor]:
        """What the next step would go by, over its rate, if its gradient were the mean of those so far."""
        return self._directions(None)

    def _directions(self, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        found: dict[int, Tensor] = {place: self._plain(place, gradients) for place in self._rest}
        for number, stack in enumerate(self._stacks):
            mean = _stacked(self._mean, stack)
            if self.kind == "Muon":
                if gradients is not None:
                    mean = torch.lerp(_stacked(gradients, stack), mean, self._momentum)
                both = even_singular_values(mean) * (0.2 * math.sqrt(max(mean.shape[-2:])))
            else:
                _, _, left, right = self._bases[number]
                turned = left.mT @ mean @ right
                both = left @ self._adam(turned, _stacked(self._square, stack), self._steps - 1) @ right.mT
            found |= dict(zip(stack, both, strict=True))
        return [found[place] for place in range(len(self.weights))]

    def _plain(self, place: int, gradients: Sequence[Tensor] | None) -> Tensor:
        if self.kind != "NAdam" or gradients is None:
            return self._adam(self._mean[place], self._square[place], self._steps)
        after = self._mu(self._steps + 1)
        now = (1 - self._mu(self._steps)) / (1 - self._product) * gradients[place]
        ahead = after / (1 - self._product * after) * self._mean[place]
        return (now + ahead) / self._root(self._square[place], self._steps)

    def _adam(self, mean: Tensor, square: Tensor, steps: int) -> Tensor:
        if not steps:
            return torch.zeros_like(mean)
        return mean / (1 - self._betas[0] ** steps) / self._root(square, steps)

    def _root(self, square: Tensor, steps: int) -> Tensor:
        return (square / (1 - self._betas[1] ** steps)).sqrt() + EPS

    def _mu(self, step: int) -> float:
        return self._betas[0] * (1 - 0.5 * 0.96 ** (step * self._psi))

    def _add_square(self, place: int, gradient: Tensor) -> None:
        self._square[place].mul_(self._betas[1]).addcmul_(gradient, gradient, value=1 - self._betas[1])

    def _add_rotated(self, number: int, gradients: Tensor) -> None:
        rows, columns, left, right = self._bases[number]
        for place, rotated in zip(self._stacks[number], left.mT @ gradients @ right, strict=True):
            self._add_square(place, rotated)
        rows.lerp_(gradients @ gradients.mT, 1 - COVARIANCE)
        columns.lerp_(gradients.mT @ gradients, 1 - COVARIANCE)


def _stacked(tensors: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    return torch.stack([tensors[place] for place in places])


def _first_bases(gradients: Tensor) -> list[Tensor]:
    """Covariances of rows and of columns, and their eigenvectors."""
    sides = [gradients @ gradients.mT, gradients.mT @ gradients]
    return [*sides, *(torch.linalg.eigh(side)[1] for side in sides)]
