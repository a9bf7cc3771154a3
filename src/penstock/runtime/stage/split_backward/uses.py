"""Which parameters a microbatch's graph uses through deferred modules, and which in any other way as well.

An embedding whose table is also the head's weight, in a custom module, say. Autograd adds both gradients to
each other before it adds them to `.grad`; with one of them waiting for W the sum would be grouped otherwise.
Such a parameter is left to I. Every microbatch may have another graph, so each is searched, just before its I.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from penstock.runtime.stage.split_backward.share import HOOKED, USED_OTHERWISE
from penstock.runtime.stage.split_backward.slot import Slot
from penstock.runtime.stage.split_backward.stage import ACCUMULATE


@dataclass
class Uses:
    """Attributes:
    owners: of each deferred module in the graph its parameters, by id.
    counts: by a parameter's id, how often deferred modules use it.
    others: the parameters used in any other way, by id.
    """

    owners: dict[Slot, set[int]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)

    def deferred(self, slot: Slot, node: Any) -> None:
        """A deferred module uses the parameter of a node."""
        p = slot.stage.watch(node)
        self.owners.setdefault(slot, set()).add(p)
        self.counts[p] = self.counts.get(p, 0) + 1

    def not_to_defer(self) -> set[Slot]:
        """The modules that have a parameter with another use, or one that somebody waits for; and those that share
        a parameter with one of these.
        """
        found = {slot for slot, p in self.owners.items() if slot.stage.hooked(p)}
        for slot in found:
            slot.reason = HOOKED
        spread = bool(found or self.others)
        others = self.others.union(*(self.owners[slot] for slot in found))
        while spread:
            spread = False
            for slot, parameters in self.owners.items():
                if slot not in found and parameters & others:
                    found.add(slot)
                    slot.reason = USED_OTHERWISE
                    others |= parameters
                    spread = True
        return found


def find_uses(outputs: Iterable[Tensor]) -> Uses:
    """Searches the graph behind some outputs."""
    uses = Uses()
    pending: list[Any] = []
    for y in outputs:
        if y.grad_fn is None:
            uses.others.add(id(y))
        else:
            pending.append(y.grad_fn)
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        edges: Any = node.next_functions
        if isinstance(node, BackwardCFunction) and isinstance(slot := getattr(node, "slot", None), Slot):
            for following, _ in edges[1:]:
                if following is not None:
                    while type(following) is not ACCUMULATE:  # its cast, its transpose
                        following = following.next_functions[0][0]
                    uses.deferred(slot, following)
            edges = edges[:1]
        for following, _ in edges:
            if type(following) is ACCUMULATE:
                uses.others.add(id(following.variable))
            elif following is not None:
                pending.append(following)
    return uses
