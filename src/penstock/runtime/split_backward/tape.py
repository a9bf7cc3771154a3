"""The tape of one microbatch through one stage: recorded in F, split into I and W.

    F            with tape.recording(): y = stage(x)
    I            tape.backward_input([y], [gy])     inputs' gradients; those of parameters not deferred
    W            tape.backward_weight()             the deferred ones, added to `.grad`

Between I and W the tape holds, for each deferred module, its input and the gradient of its output. The rest of the
graph has been freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from penstock.runtime.split_backward.autocast import without_autocast
from penstock.runtime.split_backward.prepared import PreparedModule, recording
from penstock.runtime.split_backward.rules import Workspace
from penstock.runtime.split_backward.stage import ACCUMULATE, USED_OTHERWISE, HeldCall, SplitError, SplitStage
from penstock.runtime.tensors.autograd import run_backward
from penstock.runtime.tensors.dtensor import as_shard, local

Part = tuple[Hashable | None, Tensor]


class Accumulator:
    """Sums what one microbatch gives a parameter, and adds that sum to `.grad` once; of a DTensor, this rank's part.

    `uses` counts the gradients that will come for each parameter, by id; they come last use first. Autograd,
    too, adds the uses of a parameter to each other first, in the order of I, and the sum to `.grad` afterwards. Uses
    of one cast of a parameter are added in the type of the cast.
    """

    def __init__(self, uses: Mapping[int, int]) -> None:
        self._uses = uses
        self._parts: dict[int, list[Part]] = {}
        self._workspace = Workspace()

    def workspace(self, p: Tensor) -> Workspace | None:
        """Where a gradient of `p` may be computed, unless it will be kept."""
        return self._workspace if p.grad is not None and self._uses[id(p)] == 1 else None

    def add(self, p: Tensor, grad: Tensor, cast: Hashable | None) -> None:
        """Take one gradient of `p`, that came through a cast of it or not; with the last of them, `.grad` changes."""
        if self._uses[id(p)] > 1:
            parts = self._parts.setdefault(id(p), [])
            parts.append((cast, grad))
            if len(parts) < self._uses[id(p)]:
                return
            del self._parts[id(p)]
            grad = _sum(parts, p.dtype)
        if grad.dtype is not p.dtype:
            grad = grad.to(p.dtype)
        total = p.grad
        if total is not None:
            local(total).add_(grad)
        elif grad.stride() == local(p).stride():
            p.grad = as_shard(grad, p)
        else:
            p.grad = as_shard(torch.empty_like(local(p)).copy_(grad), p)


def _sum(parts: list[Part], dtype: torch.dtype) -> Tensor:
    parts.reverse()
    left = Counter(cast for cast, _ in parts)
    sums: dict[Hashable, Tensor] = {}
    total: Tensor | None = None
    for cast, grad in parts:
        if cast is not None:
            left[cast] -= 1
            grad = sums[cast] + grad if cast in sums else grad
            if left[cast]:
                sums[cast] = grad
                continue
        grad = grad.to(dtype)
        total = grad if total is None else total + grad
    assert total is not None
    return total


Uses = dict[PreparedModule, set[int]]
"""Of each deferred module in a graph its parameters, by id."""


def find_uses(outputs: Iterable[Tensor], without_graph: Iterable[int]) -> tuple[Uses, set[int]]:
    """Searches the graph behind some outputs. Returns the deferred modules, and the parameters used in any other way.

    Args:
        without_graph: the ids of parameters that were used without a graph. What a reentrant checkpoint runs has none
            before I.
    """
    owners: Uses = {}
    others = set(without_graph)
    pending: list[Any] = []
    for y in outputs:
        if y.grad_fn is None:
            others.add(id(y))
        else:
            pending.append(y.grad_fn)
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        edges: Any = node.next_functions
        if isinstance(node, BackwardCFunction) and isinstance(
            prepared := getattr(node, "prepared", None), PreparedModule
        ):
            owners.setdefault(prepared, set()).update(prepared.stage.watched(edges[1:]))
            edges = edges[:1]
        for following, _ in edges:
            if type(following) is ACCUMULATE:
                others.add(id(following.variable))
            elif following is not None:
                pending.append(following)
    return owners, others


def not_to_defer(owners: Uses, others: set[int]) -> set[PreparedModule]:
    """The modules that have a parameter with another use, or one that somebody waits for; and those that share a
    parameter with one of these.

    An embedding whose table is also the head's weight, in a custom module, say. Autograd adds both gradients to
    each other before it adds them to `.grad`; with one of them waiting for W the sum would be grouped otherwise.
    Such a parameter is left to I. Every microbatch may have another graph, so each is searched, just before its I.
    """
    found = {prepared for prepared, parameters in owners.items() if prepared.is_awaited(parameters)}
    others = others.union(*(owners[prepared] for prepared in found))
    while more := [each for each, parameters in owners.items() if each not in found and parameters & others]:
        for prepared in more:
            prepared.reason = USED_OTHERWISE
            others |= owners[prepared]
        found.update(more)
    return found


class Tape:
    """One microbatch's forward through a stage, and the two halves of its backward.

    Args:
        stage: what the stage's prepared modules share; by default that of the modules that are called.
        defer_small: whether weight gradients that are hardly worth it wait for W too. Which are worth it is found out
            while forwards pass, so where backwards come in another order, sums would come in neither.

    Attributes:
        routes: which modules this microbatch defers; a recomputation goes the same way.
        records: whether I has not begun.
        deferring: whether any weight gradient of this microbatch waits for W.
    """

    def __init__(self, stage: SplitStage | None = None, defer_small: bool = False) -> None:
        self.defer_small = defer_small
        self.routes: dict[PreparedModule, bool] = {}
        self.records = True
        self.deferring = False
        self._is_in_input = False
        self._held: list[HeldCall] = []
        self._without_graph: set[int] = set()
        self._at_once: set[PreparedModule] = set()
        self._taps: dict[PreparedModule, tuple[Tensor, Tensor]] = {}
        self._stages: list[SplitStage] = []
        if stage is not None:
            self._join(stage)

    # -- F ---------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the stage's forward of the microbatch; may be entered again before I (stage, then loss)."""
        token = recording.set(self)
        for stage in self._stages:
            for prepared in stage.compiled:
                if prepared not in self._taps and (tap := prepared.new_tap(self)) is not None:
                    self._taps[prepared] = tap
        self._give_taps()
        try:
            yield
        finally:
            self._take_taps()
            recording.reset(token)

    @property
    def has_taps(self) -> bool:
        """Whether compiled parts of the stage may let weight gradients wait; I finds out whether they do."""
        return bool(self._taps)

    def _give_taps(self) -> None:
        for prepared, tap in self._taps.items():
            prepared.tap, prepared.defer_small = tap, self.defer_small

    def _take_taps(self) -> None:
        for prepared in self._taps:
            prepared.tap = None

    def choose(self, prepared: PreparedModule, deferrable: bool) -> bool:
        """Fixes whether this microbatch defers `prepared`, at its first call; a recomputation adds none."""
        if not self.records:
            return False
        self.routes[prepared] = deferrable
        self.deferring = self.deferring or deferrable
        if prepared.stage not in self._stages:
            self._join(prepared.stage)
        return deferrable

    def note_without_graph(self, parameters: Iterable[Tensor | None]) -> None:
        """A module is called without a graph. If a reentrant checkpoint calls it, its gradients come in a backward of
        the checkpoint's own during I: all uses of these parameters are left to I.
        """
        if self.records:
            self._without_graph.update(map(id, parameters))

    def _join(self, stage: SplitStage) -> None:
        self._stages.append(stage)
        stage.record()

    # -- I ---------------------------------------------------------------------------------------------------

    def backward_input(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """I: fills `.grad` of the stage's inputs and of the parameters not deferred; keeps what W needs.

        Where a gradient is None: that of a single number (a loss) is one, as in `Tensor.backward`; any other
        output takes no part. Leave a number out that is not a loss and got no gradient.
        """
        roots = [
            (y, g)
            for y, g in zip(outputs, grads, strict=True)
            if y.requires_grad and (g is not None or y.numel() == 1)
        ]
        if self.deferring or self._taps:
            self._find_out_who_waits([y for y, _ in roots])
        self._is_in_input, self.records = True, False
        without_grad: list[Tensor] = []
        for stage in self._stages:
            stage.recomputing = self
            if self.deferring:
                stage.wait(self)
                without_grad += [p for p in stage.parameters.values() if p.grad is None]
        self._give_taps()  # what a checkpoint runs again makes the same graph
        try:
            if roots:
                run_backward([y for y, _ in roots], [g for _, g in roots])
        finally:
            self._take_taps()
            self._taps.clear()
            for stage in self._stages:
                stage.recomputing = None
            self._is_in_input = False
        if self._held and without_grad:
            self._part_from(without_grad)
        self.routes.clear()
        self._at_once.clear()

    def _find_out_who_waits(self, outputs: Sequence[Tensor]) -> None:
        """Finds the modules that cannot wait in this microbatch. What waits of earlier ones is then added first."""
        owners, others = find_uses(outputs, self._without_graph)
        self._at_once = not_to_defer(owners, others)
        for prepared in self._at_once:
            prepared.stage.add_first(owners[prepared])
        for prepared in self._taps:
            if prepared not in owners:
                self._at_once.add(prepared)
                prepared.stage.in_graph[prepared] = None
            elif prepared not in self._at_once:
                self.deferring = True

    def defers(self, prepared: PreparedModule) -> bool:
        """True while I runs, if the weight gradients of `prepared` may wait for W."""
        return self._is_in_input and prepared not in self._at_once

    def hold(self, prepared: PreparedModule, call: HeldCall) -> None:
        """Keeps what W needs of one call."""
        self._held.append(call)
        prepared.stage.deferred[prepared] += call.rule.work(call.x, call.used_weight)

    def _part_from(self, parameters: Iterable[Tensor]) -> None:
        """Give each `.grad` that autograd made of a held tensor's own memory a memory of its own.

        A gradient that passes an addition unchanged may end as the `.grad` of some parameter that had none, to which
        the next microbatch's I adds in place.
        """
        held = {h.g.untyped_storage().data_ptr() for h in self._held}
        for p in parameters:
            grad = p.grad
            if grad is None or grad.layout is not torch.strided:
                continue
            if local(grad).untyped_storage().data_ptr() in held:
                p.grad = grad.clone()

    # -- W ---------------------------------------------------------------------------------------------------

    def backward_weight(self) -> None:
        """W: computes the deferred weight gradients, adds them to `.grad`, frees everything."""
        for stage in self._stages:
            stage.done(self)
        if self._held:
            self._compute()

    def holds(self, parameters: Collection[int]) -> bool:
        """Whether a gradient of one of these parameters, by id, waits."""
        return any(id(h.weight) in parameters or id(h.bias) in parameters for h in self._held)

    def add(self) -> None:
        """Computes what is held before W comes, and adds it to `.grad`."""
        if self._held:
            with without_autocast(self._held[0].x.device.type):
                self._compute()

    def _compute(self) -> None:
        held, self._held = self._held, []
        uses = Counter(id(p) for h in held for p, needed in zip((h.weight, h.bias), h.needs) if needed)
        accumulator = Accumulator(uses)
        with torch.no_grad():
            while held:
                # What I kept last is still in cache, and its memory is given back in order.
                rule, weight, bias, casts, g, x, used_weight, needs, g_version, x_version = held.pop()
                if g._version != g_version or x._version != x_version:
                    raise SplitError(
                        "an input or output gradient of a stage was modified in place between I and W, "
                        f"which still needs it (shapes {tuple(x.shape)} and {tuple(g.shape)}); modify a "
                        "copy, or run W first"
                    )
                gw, gb = rule.weight_grads(g, x, used_weight, bias, needs, accumulator.workspace(weight))
                if gw is not None:
                    accumulator.add(weight, gw, casts[0])
                if gb is not None and bias is not None:
                    accumulator.add(bias, gb, casts[1])

    @property
    def deferred_bytes(self) -> int:
        """Bytes still held for W; a memory that several modules share counts once."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for h in self._held for t in (h.g, h.x)}
        return sum(storage.nbytes() for storage in storages.values())
