"""A few numbers that stand for a gradient: they tell how far it is from another one, without keeping either.

Each number is the sum of all elements with random signs. If two gradients differ by d, such sums differ by about the
norm of d. The signs of an element are a product of two, of its column and of its row in a matrix of rows of `_ROW`
elements, so few signs are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.runtime.tensors.dtensor import local


@dataclass(frozen=True)
class Sketch:
    """A gradient's norm, and its sums with random signs, from which the distance to another gradient is estimated.

    Attributes:
        projections: the sums, one for each of `NUM_SIGNS` patterns of signs.
        norm: the gradient's norm.
        size: its number of elements.
    """

    projections: tuple[float, ...]
    norm: float
    size: int

    @classmethod
    def of(cls, gradient: Tensor) -> Sketch:
        """Of the part of a gradient that lies here."""
        part = local(gradient.detach())
        part = part.to_dense() if part.layout is not torch.strided else part
        flat = (torch.view_as_real(part.resolve_conj()) if part.is_complex() else part).reshape(-1)
        columns = _signs(_ROW, 1).to(flat.device)
        sums, square = torch.zeros(NUM_SIGNS, dtype=torch.float64, device=flat.device), 0.0
        for number, piece in enumerate(flat.split(_ROW * 64)):
            values = piece.double()
            square += float(values.square().sum())
            rows = torch.nn.functional.pad(values, (0, -len(values) % _ROW)).view(-1, _ROW)
            turned = _signs(len(rows), 2 + number).to(flat.device)
            sums += ((rows @ columns) * turned).sum(0)
        return cls(tuple(sums.tolist()), square**0.5, flat.numel())

    def distance(self, other: Sketch | None) -> float:
        """An estimate of the norm of the difference."""
        theirs = (0.0,) * NUM_SIGNS if other is None else other.projections
        squares = [(a - b) ** 2 for a, b in zip(self.projections, theirs, strict=True)]
        return float((sum(squares) / NUM_SIGNS) ** 0.5)


NUM_SIGNS = 8
"""Patterns of signs. All of them miss a difference with a chance below 1e-6."""
_ROW = 4096


def _signs(num: int, seed: int) -> Tensor:
    """Random signs, [num, NUM_SIGNS], the same in every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (num, NUM_SIGNS), generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
