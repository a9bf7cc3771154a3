"""How much of a stage's work on weight gradients waits for W, in multiply-adds; and why the rest does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from penstock.runtime.stage.split_backward.slot import Slot

TOO_SMALL = "too little work to be worth the delay"
HOOKED = "a hook is to see the gradient"
HOOKED_MODULE = "a module around has a backward hook"
USED_OTHERWISE = "used in another way as well"
UNKNOWN = "of a type, or called in a way, that is not split"
COMPILED = "computed by the compiled backward: too little work to be worth the delay, or a bias"
NO_RULE = "not of a linear, convolution or embedding that can be split"


@dataclass(frozen=True)
class DeferredShare:
    """What a split backward put off in a stage, in the last step that split it.

    Work is in multiply-adds, of the microbatches whose backward was split. That of a parameter which no linear,
    convolution or embedding has is an estimate: each of its entries is taken to see as many rows (tokens, or places
    of an image) as the layer that saw most.

    Attributes:
        deferred: done in W.
        at_once: done in I.
        reasons: why -> the parameters whose gradients were computed in I, by their names in the stage.
    """

    deferred: int
    at_once: int
    reasons: Mapping[str, tuple[str, ...]]

    @property
    def share(self) -> float:
        """Of the work the part done in W, from 0 to 1."""
        return self.deferred / max(self.deferred + self.at_once, 1)


class Tally:
    """Counts a stage's calls by the shapes of their inputs. The first microbatch of a step forgets those before."""

    def __init__(self) -> None:
        self._stale = False
        self._deferred: Counter[tuple[Slot, torch.Size]] = Counter()
        self._at_once: Counter[tuple[Slot, torch.Size]] = Counter()
        self._in_graph: Counter[Slot] = Counter()
        self.num_tapes = 0

    def begin(self) -> None:
        """Another step begins."""
        self._stale = True

    def begin_tape(self) -> None:
        """Another microbatch of a split backward is recorded."""
        if self._stale:
            self._stale = False
            self._deferred.clear()
            self._at_once.clear()
            self._in_graph.clear()
            self.num_tapes = 0
        self.num_tapes += 1

    def deferred(self, slot: Slot, x: Tensor) -> None:
        """A call whose weight gradient waits for W."""
        self._deferred[slot, x.shape] += 1

    def at_once(self, slot: Slot, x: Tensor) -> None:
        """A call whose weight gradient is computed in I."""
        self._at_once[slot, x.shape] += 1

    def in_graph(self, slot: Slot) -> None:
        """A microbatch in which a compiled backward computed a module's weight gradient, if it was called at all."""
        self._in_graph[slot] += 1

    def share(self, others: Mapping[str, Tensor], compiled: Collection[str] = ()) -> DeferredShare:
        """What was counted.

        Args:
            others: the parameters of no prepared module.
            compiled: of these the names of biases of prepared modules in compiled parts.
        """
        reasons: dict[str, dict[str, None]] = {}
        for slot in [*(slot for slot, _ in self._at_once), *self._in_graph]:
            reasons.setdefault(slot.reason, {}).update(dict.fromkeys(slot.parameters))
        wanted = {name: p for name, p in others.items() if p.requires_grad}
        for name in wanted:
            reasons.setdefault(COMPILED if name in compiled else NO_RULE, {})[name] = None
        rows = max((slot.rule.rows(_like(shape)) for slot, shape in [*self._deferred, *self._at_once]), default=0)
        rest = rows * self.num_tapes * sum(p.numel() for p in wanted.values())
        rest += rows * sum(times * slot.weight.numel() for slot, times in self._in_graph.items())
        return DeferredShare(
            _work(self._deferred),
            _work(self._at_once) + rest,
            {reason: tuple(names) for reason, names in reasons.items()},
        )


def _work(calls: Mapping[tuple[Slot, torch.Size], int]) -> int:
    return sum(times * slot.rule.work(_like(shape), slot.weight) for (slot, shape), times in calls.items())


def _like(shape: torch.Size) -> Tensor:
    return torch.empty(shape, device="meta")
