"""Stages whose outputs share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from runtime_cases import Case, Do, W, batches, each, ends, lin

ALIASES: dict[str, Callable[[int, int], Case]] = {}
"""Name -> function of (number of stages, number of microbatches)."""
CLOSE: dict[str, Callable[[int, int], Case]] = {}
"""Cases whose gradients come in another layout than in the plain loop, so that kernels round otherwise."""


class Scaled(nn.Module):
    """Multiplies in place by a parameter, and adds a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, W))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.scale.reshape(-1)[: x.shape[-1]]).add_(0.25)


def alias(make: Callable[[int, int], Case]) -> Callable[[int, int], Case]:
    ALIASES[make.__name__] = make
    return make


def close(make: Callable[[int, int], Case]) -> Callable[[int, int], Case]:
    CLOSE[make.__name__] = make
    return make


def chain(stages: int, num: int, first: Any, middle: Any, last: Any, *shape: int) -> Case:
    """Stages with two linears and something that changes its input in place each; for one stage no more than that."""
    if stages == 1:
        return Case([Do(lambda ls, x: ls[0](x), lin())], batches(num, *(shape or (W,))))
    models = each(stages, lambda s: Do(ends(stages, s, first, middle, last), lin(), lin(), Scaled()))
    return Case(models, batches(num, *(shape or (W,))))


@alias
def a_tensor_and_a_view_of_it(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        h = ls[0](x)
        return h, h.view(-1, 2, W // 2)

    def middle(ls: Any, h: Tensor, v: Tensor) -> Any:
        y = ls[0](v.flatten(1).tanh())
        return y, y.view(-1, 2, W // 2)

    def last(ls: Any, h: Tensor, v: Tensor) -> Tensor:
        return ls[0](h.sigmoid()) + v.flatten(1) * 3

    return chain(stages, num, first, middle, last)


@close
def a_norm_read_another_way_is_changed(stages: int, num: int) -> Case:
    """One output, a view of another layout: where it is changed in place, its gradient comes in the norm's own."""

    def norm(h: Tensor) -> Tensor:
        return nn.functional.batch_norm(h.transpose(1, 2), None, None, training=True).transpose(1, 2)

    def first(ls: Any, x: Tensor) -> Any:
        return norm(ls[0](x))

    def middle(ls: Any, v: Tensor) -> Any:
        return norm(ls[0](ls[2](v).tanh()))

    def last(ls: Any, v: Tensor) -> Tensor:
        return ls[0](ls[2](v))

    return chain(stages, num, first, middle, last, 5, W)


@alias
def a_view_of_a_tensor_is_changed(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        h = ls[0](x)
        return h, h[:, 2:6]

    def middle(ls: Any, h: Tensor, v: Tensor) -> Any:
        y = ls[0](h.tanh()) * 2
        return y, y[:, 2:6]

    def last(ls: Any, h: Tensor, v: Tensor) -> Tensor:
        return ls[0](h.sigmoid()) + (v * v).sum(1, keepdim=True)

    return chain(stages, num, first, middle, last)


@alias
def overlapping_slices_of_what_is_not_sent(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        h = ls[0](x)
        return h[:, :6], h[:, 2:]

    def middle(ls: Any, a: Tensor, b: Tensor) -> Any:
        h = ls[0](torch.cat([a[:, :2], b], 1).tanh())
        return h[:, :6], h[:, 2:]

    def last(ls: Any, a: Tensor, b: Tensor) -> Tensor:
        return ls[0](torch.cat([a, b[:, 4:]], 1).sigmoid())

    return chain(stages, num, first, middle, last)


@alias
def slices_side_by_side(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        h = ls[0](x)
        return h[:, :4], h[:, 4:]

    def middle(ls: Any, a: Tensor, b: Tensor) -> Any:
        h = ls[0](torch.cat([a, b.tanh()], 1))
        return h[:, :4], h[:, 4:]

    def last(ls: Any, a: Tensor, b: Tensor) -> Tensor:
        return ls[0](torch.cat([a, b], 1).sigmoid())

    return chain(stages, num, first, middle, last)


@alias
def a_tensor_and_itself_without_gradient(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        h = ls[0](x)
        return h, h.detach(), h.detach()[:, 1:3]

    def middle(ls: Any, h: Tensor, d: Tensor, s: Tensor) -> Any:
        y = ls[0](h.tanh()) + d
        return y, y.detach(), s

    def last(ls: Any, h: Tensor, d: Tensor, s: Tensor) -> Tensor:
        return ls[0](h.sigmoid()) + h + d + 2 * s.sum(1, keepdim=True)

    return chain(stages, num, first, middle, last)


@alias
def what_has_no_gradient_gets_one_in_place(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        h = torch.full_like(x, 0.5)
        return ls[0](x), h, h.view(-1, 2, W // 2)

    def middle(ls: Any, x: Tensor, h: Tensor, v: Tensor) -> Any:
        return ls[0](x), h, v

    def last(ls: Any, x: Tensor, h: Tensor, v: Tensor) -> Tensor:
        return ls[0](x) + h + v.flatten(1) * 2

    return chain(stages, num, first, middle, last)


@alias
def two_views_of_one_memory_that_pass_through_stages(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        h = ls[0](x)
        return ls[1](x), h, h.t()

    def middle(ls: Any, x: Tensor, h: Tensor, t: Tensor) -> Any:
        return ls[0](x.tanh()), h, t

    def last(ls: Any, x: Tensor, h: Tensor, t: Tensor) -> Tensor:
        return ls[0](x) + h + t.t() * 3

    return chain(stages, num, first, middle, last)


@alias
def three_views_one_of_another(stages: int, num: int) -> Case:
    def views(h: Tensor) -> Any:
        v = h.view(-1, 2, W // 2)
        return v[:, 1], h, v, v[:, :, 1:]

    def first(ls: Any, x: Tensor) -> Any:
        return views(ls[0](x))

    def used(h: Tensor, half: Tensor, v: Tensor, part: Tensor) -> Tensor:
        return h * 1.1 + h.tanh() + (v.sin() * 0.7).flatten(1) + half.cos().repeat(1, 2) + part.sum((1, 2))[:, None]

    def middle(ls: Any, half: Tensor, h: Tensor, v: Tensor, part: Tensor) -> Any:
        return views(ls[0](used(h, half, v, part)))

    def last(ls: Any, half: Tensor, h: Tensor, v: Tensor, part: Tensor) -> Tensor:
        y = used(h.clone(), half.clone(), v.clone(), part.clone())
        return ls[0](y) + used(h, half, v, part)

    return chain(stages, num, first, middle, last)


@alias
def complex_numbers_and_their_parts(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        c = torch.complex(ls[0](x), ls[1](x))
        return c, torch.view_as_real(c), c.conj()

    def middle(ls: Any, c: Tensor, r: Tensor, j: Tensor) -> Any:
        n = torch.complex(ls[0](c.real), j.imag * r.mean())
        return n, torch.view_as_real(n), n.conj()

    def last(ls: Any, c: Tensor, r: Tensor, j: Tensor) -> Tensor:
        return ls[0](r.sum(-1)) + j.imag + (c * 0.5j).real

    return chain(stages, num, first, middle, last)


@alias
def a_view_of_the_input(stages: int, num: int) -> Case:
    """Added to, not multiplied: nothing before has saved it."""

    def first(ls: Any, x: Tensor) -> Any:
        h = ls[0](x)
        return h + 1, h[:, :4]

    def middle(ls: Any, x: Tensor, v: Tensor) -> Any:
        return x + ls[0](torch.ones_like(x)), x[:, 4:], v

    def passing(ls: Any, x: Tensor, *views: Tensor) -> Any:
        return (x + ls[0](torch.ones_like(x)), x[:, 4:], *views[1:])

    def last(ls: Any, x: Tensor, *views: Tensor) -> Tensor:
        return ls[0](x.tanh()) + sum(view.mean(1, keepdim=True) for view in views)

    if stages == 1:
        return chain(1, num, first, middle, last)
    models = each(
        stages, lambda s: Do(ends(stages, s, first, middle if s == 1 else passing, last), lin(), lin(), Scaled())
    )
    return Case(models, batches(num, W))


@alias
def expanded_and_whole(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        h = ls[0](x).mean(1, keepdim=True)
        return h, h.expand(-1, W)

    def middle(ls: Any, h: Tensor, e: Tensor) -> Any:
        y = ls[0](e.tanh() * h).mean(1, keepdim=True)
        return y, y.expand(-1, W)

    def last(ls: Any, h: Tensor, e: Tensor) -> Tensor:
        return ls[0](e) + h

    return chain(stages, num, first, middle, last)


@alias
def of_another_type(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        h = ls[0](x)
        return h, h.detach().view(torch.int32)

    def middle(ls: Any, h: Tensor, bits: Tensor) -> Any:
        y = ls[0](h.tanh() + (bits & 1))
        return y, y.detach().view(torch.int32)

    def last(ls: Any, h: Tensor, bits: Tensor) -> Tensor:
        return ls[0](h) + h + (bits & 1)

    return chain(stages, num, first, middle, last)


@alias
def in_dicts_and_nested(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        h = ls[0](x)
        return {"h": h, "rest": (h.view(-1, W, 1), {"again": h, "n": 2})}

    def middle(ls: Any, h: Tensor, rest: Any) -> Any:
        assert rest[1]["again"] is h
        y = ls[0](rest[0].squeeze(-1).tanh())
        return {"h": y, "rest": (y.view(-1, W, 1), {"again": y, "n": 2})}

    def last(ls: Any, h: Tensor, rest: Any) -> Tensor:
        return ls[0](h.sigmoid()) + rest[1]["again"] * rest[1]["n"]

    return chain(stages, num, first, middle, last)
