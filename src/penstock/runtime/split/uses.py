"""Finds the parameters that a stage uses both through a deferred module and in another way.

An embedding whose table is also the head's weight, in a custom module, say. Autograd adds both gradients to
each other before it adds them to `.grad`; with one of them waiting for W the sum would be grouped otherwise.
Such a parameter is left to I. The graph is searched once for each module, at its first I, when no W has run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from penstock.runtime.split.slot import Slot


def mark_shared(routes: Mapping[Slot, bool], outputs: Iterable[Tensor]) -> None:
    """Set `at_once` of each deferred module whose parameters have a use that is not deferred."""
    if all(slot.checked for slot, deferred in routes.items() if deferred):
        return
    owners, native = _parameter_uses(outputs)
    spread = True
    while spread:
        spread = False
        for slot, parameters in owners.items():
            if not slot.at_once and parameters & native:
                slot.at_once = spread = True
                native |= parameters
    for slot, deferred in routes.items():
        slot.checked = slot.checked or deferred


def _parameter_uses(outputs: Iterable[Tensor]) -> tuple[dict[Slot, set[int]], set[int]]:
    """The parameters of each deferred module in the graph, and those used in any other way, by id."""
    owners: dict[Slot, set[int]] = {}
    native: set[int] = set()
    pending: list[Any] = [y.grad_fn for y in outputs]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        slot = _deferring(node)
        for following, _ in node.next_functions:
            if type(following).__name__ != "AccumulateGrad":
                pending.append(following)
            elif slot is not None:
                owners.setdefault(slot, set()).add(id(following.variable))
            else:
                native.add(id(following.variable))
    return owners, native


def _deferring(node: Any) -> Slot | None:
    slot = getattr(node, "slot", None)
    return slot if isinstance(slot, Slot) and not slot.at_once else None
