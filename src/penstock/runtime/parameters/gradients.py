"""Gradients of parameters: how several sums of them take turns in `.grad`, and how they are clipped.

    sum 0 in .grad, sum 1 aside --select(1)--> sum 1 in .grad, sum 0 aside

If copies of a stage are one module, each has a sum of its own (`copies.py`). If updates are ops, so has each window
of microbatches: an input half (I) of the next window may run before a weight half (W) of this one. Autograd and the
split backward add to whatever is in `.grad`.

Gradients are clipped by the norm of the whole model's gradient, once, wherever the parts of the model are. Norms are
computed parameter by parameter, gathered in the model's order, and combined as in `torch.nn.utils.clip_grad_norm_`.
So the result is the same to the bit however the model is cut. On a GPU torch computes the norms of many gradients at
once, with kernels that add in another order, and so does this module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.mesh.peers import Peers
from penstock.runtime.tensors.autograd import added
from penstock.runtime.tensors.dtensor import as_shard, is_sharded, local, whole

Gradients = list[Tensor | None]
"""One for each parameter, in their order; None where there is none."""


class GradientSums:
    """Sums of the gradients of some parameters, by number: one lies in `.grad`, and the others are kept aside.

    Args:
        selected: the number of the first that lies in `.grad`.

    Attributes:
        aside: the sums that are kept aside, by number. peak_bytes: the most bytes held since `begin`.
    """

    def __init__(self, parameters: Sequence[Parameter], selected: int = 0) -> None:
        self._parameters, self._first = parameters, selected
        self._selected = selected
        self.aside: dict[int, Gradients] = {}
        self.peak_bytes = 0

    def begin(self) -> None:
        """Starts anew: the first sum lies in `.grad`, and there is no other."""
        self._selected, self.peak_bytes = self._first, 0
        self.aside.clear()

    def select(self, number: int) -> None:
        """Puts a sum into `.grad`; None if there is no such sum yet."""
        if number == self._selected:
            return
        before = taken_from(self._parameters, self.aside.pop(number, None))
        if any(gradient is not None for gradient in before):  # nothing is left of a sum that was taken
            self.aside[self._selected] = before
        self._selected = number

    def take(self, number: int) -> Gradients:
        """Gives a sum away."""
        self._measure()
        if number == self._selected:
            return taken_from(self._parameters)
        return self.aside.pop(number, None) or [None] * len(self._parameters)

    def held(self, number: int) -> Gradients:
        """A sum, which stays here."""
        if number == self._selected:
            return self.now()
        return self.aside.get(number) or [None] * len(self._parameters)

    def now(self) -> Gradients:
        """The sum in `.grad`."""
        return [p.grad for p in self._parameters]

    def end(self, kept: int | None) -> None:
        """Drops all sums but one, which lies in `.grad` then."""
        self._measure()
        if kept is None:
            taken_from(self._parameters)
        else:
            self.select(kept)
        self.aside.clear()
        self._selected = self._first

    def _measure(self) -> None:
        """Notes the bytes held. Sums grow until one is taken, so this is called then, and at the end."""
        held = [*self.now(), *(g for gradients in self.aside.values() for g in gradients)]
        self.peak_bytes = max(self.peak_bytes, num_bytes(g for g in held if g is not None))


def taken_from(parameters: Sequence[Parameter], others: Gradients | None = None) -> Gradients:
    """Takes the gradients out of `.grad`, and puts others there, if any."""
    before = [p.grad for p in parameters]
    for place, parameter in enumerate(parameters):
        parameter.grad = None if others is None else others[place]
    return before


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all elements that lie in this process. A tensor that is given twice counts once."""
    return sum(local(t).numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


_ABSENT = -1.0
CPU = torch.device("cpu")


def norms_of(gradients: Sequence[Tensor], holders: Peers | None = None) -> list[Tensor]:
    """The norm of each gradient, on its device. Processes that hold shards of one compute its norm together.

    Args:
        holders: who hold shards, where they outlive a lost link, as sums of torch's own do not.
    """
    found: dict[int, Tensor] = {}
    plain = [place for place, gradient in enumerate(gradients) if not is_sharded(gradient) and gradient.is_cuda]
    for group in _by_type([gradients[place] for place in plain]):
        members = [plain[number] for number in group]
        found |= zip(members, torch._foreach_norm([gradients[place] for place in members]), strict=True)
    shards = [place for place, gradient in enumerate(gradients) if holders is not None and is_sharded(gradient)]
    if shards and holders is not None:
        parts = [torch.linalg.vector_norm(local(gradients[place])) for place in shards]
        squares = holders.sum(torch.stack([part.square().to(CPU, torch.float64) for part in parts]))
        found |= {p: square.to(part).sqrt() for p, square, part in zip(shards, squares, parts, strict=True)}
    return [
        found[place] if place in found else whole(torch.linalg.vector_norm(gradient))
        for place, gradient in enumerate(gradients)
    ]


def begin_norm(
    dtypes: Mapping[str, torch.dtype],
    held: Mapping[str, Parameter],
    owned: Collection[str],
    peers: Peers,
    device: torch.device = CPU,
    holders: Peers | None = None,
) -> Callable[[], Tensor]:
    """Begins to compute the norm of all gradients of the model; returns a function that waits for it.

    Args:
        dtypes: of every parameter of the model, by name, in the model's order, each once.
        held: the parameters in this process. Processes that hold shards of one compute its norm together.
        owned: the names that this process answers for. One process answers for each.
        device: of the gradients. There norms are combined, and the result lies.
        holders: see `norms_of`.
    """
    places = {name: place for place, name in enumerate(dtypes) if name in held and held[name].grad is not None}
    gradients = [held[name].grad.detach() for name in places]  # type: ignore[union-attr]
    measured = {name: norm for name, norm in zip(places, norms_of(gradients, holders), strict=True) if name in owned}
    norms = torch.zeros(len(dtypes), dtype=torch.float64, device="cpu")
    for place, name in enumerate(dtypes):
        if name in owned and name not in places:
            norms[place] = _ABSENT
    if measured:  # all at once: each copy from a GPU waits for it
        values = torch.stack([norm.to(device, torch.float64) for norm in measured.values()]).cpu()
        norms[[places[name] for name in measured]] = values
    summed = peers.begin_sum(norms)
    return lambda: _combined(summed(), dtypes, device)


def _combined(norms: Tensor, dtypes: Mapping[str, torch.dtype], device: torch.device) -> Tensor:
    """Computes the norm of the whole from the norm of each parameter's gradient."""
    # A norm has the real type of its gradient.
    present = [(norm, dtype) for norm, dtype in zip(norms, dtypes.values(), strict=True) if norm != _ABSENT]
    if not present:
        return torch.tensor(0.0, device=device)
    order = chain.from_iterable(_by_type([torch.empty(0, dtype=dtype, device="cpu") for _, dtype in present]))
    combined = torch.stack([present[k][0].to(present[k][1].to_real()) for k in order])
    return torch.linalg.vector_norm(combined.to(device))


def _by_type(gradients: Sequence[Tensor]) -> list[list[int]]:
    """The places of gradients, device by device and type by type, in the order of `clip_grad_norm_`."""
    if not gradients:
        return []
    groups = Optimizer._group_tensors_by_device_and_dtype([list(gradients)], with_indices=True)
    return [places for _, places in groups.values()]


def factor_of(max_norm: float, norm: Tensor) -> Tensor:
    """The factor that brings gradients of such a norm to at most `max_norm`."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def summed(parts: Sequence[Gradients]) -> Gradients:
    """((g0 + g1) + g2) ..., parameter by parameter; none of the parts is changed."""
    return [reduce(added, gradients, None) for gradients in zip(*parts, strict=True)]


def clipped(gradients: Gradients, max_norm: float, masters: Sequence[Parameter]) -> Gradients:
    """Scales gradients to a norm of at most `max_norm` over all of them, as `torch.nn.utils.clip_grad_norm_` does.

    If masters are shards, all processes that hold them compute the norm together.
    """
    present = [as_shard(g, master) for g, master in zip(gradients, masters, strict=True) if g is not None]
    if not present:
        return gradients
    factor = factor_of(max_norm, torch.linalg.vector_norm(torch.stack(norms_of(present))))
    return [None if g is None else g * factor for g in gradients]


def scale_gradients(parameters: Sequence[Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales gradients in place to a norm of at most `max_norm`; one that tied parameters share is scaled once."""
    factor = factor_of(max_norm, norm)
    there = {norm.device: factor}
    gradients = {id(p.grad): local(p.grad) for p in parameters if p.grad is not None}
    for gradient in gradients.values():
        if gradient.device not in there:
            there[gradient.device] = factor.to(gradient.device)
        gradient.mul_(there[gradient.device])
