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
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from penstock.runtime.stage.autograd import run_backward
from penstock.runtime.stage.split_backward.prepared_module import PreparedModule, recording, without_autocast
from penstock.runtime.stage.split_backward.rules import SplitRule, Workspace
from penstock.runtime.stage.split_backward.stage import ACCUMULATE, USED_OTHERWISE, Edges, SplitError, SplitStage
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
        return self._workspace if p.grad is not None and self._uses.get(id(p)) == 1 else None

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


@dataclass
class ParameterUses:
    """How the parameters of a microbatch's graph are used, which decides whose gradients may wait for W.

    Attributes:
        owners: of each deferred module in the graph its parameters, by id.
        counts: by a parameter's id, how often deferred modules use it.
        others: the parameters used in any other way, by id.

    An embedding whose table is also the head's weight, in a custom module, say. Autograd adds both gradients to
    each other before it adds them to `.grad`; with one of them waiting for W the sum would be grouped otherwise.
    Such a parameter is left to I. Every microbatch may have another graph, so each is searched, just before its I.
    """

    owners: dict[PreparedModule, set[int]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)

    def deferred(self, prepared: PreparedModule, edges: Edges) -> None:
        """A deferred module uses the parameters to which these edges lead."""
        found = prepared.stage.watched(prepared, edges)
        self.owners.setdefault(prepared, set()).update(found)
        for p in found:
            self.counts[p] = self.counts.get(p, 0) + 1

    def not_to_defer(self) -> set[PreparedModule]:
        """The modules that have a parameter with another use, or one that somebody waits for; and those that share
        a parameter with one of these.
        """
        found = {prepared for prepared, p in self.owners.items() if prepared.is_awaited(p)}
        spread = bool(found or self.others)
        others = self.others.union(*(self.owners[prepared] for prepared in found))
        while spread:
            spread = False
            for prepared, parameters in self.owners.items():
                if prepared not in found and parameters & others:
                    found.add(prepared)
                    prepared.reason = USED_OTHERWISE
                    others |= parameters
                    spread = True
        return found


def find_uses(outputs: Iterable[Tensor]) -> ParameterUses:
    """Searches the graph behind some outputs."""
    uses = ParameterUses()
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
        if isinstance(node, BackwardCFunction) and isinstance(
            prepared := getattr(node, "prepared", None), PreparedModule
        ):
            uses.deferred(prepared, edges[1:])
            edges = edges[:1]
        for following, _ in edges:
            if type(following) is ACCUMULATE:
                uses.others.add(id(following.variable))
            elif following is not None:
                pending.append(following)
    return uses


class Phase(Enum):
    """Where a tape stands."""

    RECORDING = "before I"
    INPUT = "inside I"
    HOLDING = "between I and W"
    DONE = "after W"


class DeferredCall(NamedTuple):
    """What W needs of one call of a deferred module."""

    rule: SplitRule
    weight: Tensor
    bias: Tensor | None
    g: Tensor
    x: Tensor
    cast_weight: Tensor
    casts: tuple[Any, Any] | None
    needs: tuple[bool, bool]
    g_version: int
    x_version: int


class Tape:
    """One microbatch's forward through a stage, and the two halves of its backward.

    Args:
        stage: what the stage's prepared modules share; by default that of the modules that are called.
        defer_small: whether weight gradients that are hardly worth it wait for W too. Which are worth it is found out
            while forwards pass, so where backwards come in another order, sums would come in neither.
    """

    def __init__(self, stage: SplitStage | None = None, defer_small: bool = False) -> None:
        self.defer_small = defer_small
        self.routes: dict[PreparedModule, bool] = {}
        """Which modules this microbatch defers; a recomputation goes the same way."""
        self.turned: set[PreparedModule] = set()
        """Those whose weight has a node of its own at every call, where it is transposed."""
        self.records = True
        """Whether I has not begun."""
        self._phase = Phase.RECORDING
        self._deferring = False
        self._held: list[DeferredCall] = []
        self._uses: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._at_once: set[PreparedModule] = set()
        self._taps: dict[PreparedModule, tuple[Tensor, Tensor]] = {}
        self._compiled: Collection[PreparedModule] = ()
        self._stages: list[SplitStage] = []
        if stage is not None:
            self._join(stage)

    @property
    def deferring(self) -> bool:
        """Whether any weight gradient of this microbatch waits for W."""
        return self._deferring

    # -- F ---------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the stage's forward of the microbatch; may be entered again before I (stage, then loss)."""
        if self._phase is not Phase.RECORDING:
            raise SplitError(f"a tape was recorded {self._phase.value}; use a new Tape for each microbatch")
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

    def choose(self, prepared: PreparedModule, deferrable: bool, turned: bool) -> bool:
        """Fix whether this microbatch defers `prepared`, at its first call; a recomputation adds none."""
        if not self.records:
            return False
        self.routes[prepared] = deferrable
        if turned:
            self.turned.add(prepared)
        self._deferring = self._deferring or deferrable
        if prepared.stage not in self._stages:
            self._join(prepared.stage)
        return deferrable

    def _join(self, stage: SplitStage) -> None:
        self._stages.append(stage)
        stage.call_counts.begin_tape()

    # -- I ---------------------------------------------------------------------------------------------------

    def backward_input(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """I: fill `.grad` of the stage's inputs and of the parameters not deferred; keep what W needs.

        Where a gradient is None: that of a single number (a loss) is one, as in `Tensor.backward`; any other
        output takes no part. Leave a number out that is not a loss and got no gradient.
        """
        if self._phase is not Phase.RECORDING:
            raise SplitError(
                f"backward_input was called {self._phase.value}; each microbatch has one F, one I, one W, "
                "each F on a new Tape"
            )
        if len(outputs) != len(grads):
            raise SplitError(f"backward_input got {len(outputs)} outputs and {len(grads)} gradients")
        roots = _roots(outputs, grads)
        if self._deferring or self._taps:
            self._sort([output for output, _ in roots])
        self._phase, self.records = Phase.INPUT, False
        for stage in self._stages:
            stage.recomputing = self
            if self._deferring:
                stage.wait(self)
        without_grad = self._without_grad() if self._deferring else []
        self._give_taps()  # what a checkpoint runs again makes the same graph
        try:
            if roots:
                run_backward([y for y, _ in roots], [g for _, g in roots])
        finally:
            self._take_taps()
            self._taps.clear()
            for stage in self._stages:
                stage.recomputing = None
            self._phase = Phase.HOLDING
        if self._held and without_grad:
            self._part_from(without_grad)
        self.routes.clear()
        self._at_once.clear()
        self._compiled = ()

    def _sort(self, outputs: Sequence[Tensor]) -> None:
        """Finds out which modules cannot wait in this microbatch; what waits of earlier ones is then added first."""
        uses = find_uses(outputs)
        self._counts = uses.counts
        self._at_once = uses.not_to_defer()
        for prepared in self._at_once:
            if prepared.stage.waits:
                prepared.stage.add_first(uses.owners[prepared])
        self._compiled = [
            prepared for prepared in self._taps if prepared in uses.owners and prepared not in self._at_once
        ]
        self._deferring = self._deferring or bool(self._compiled)
        for prepared in self._taps:
            if prepared not in uses.owners:
                prepared.stage.call_counts.in_graph(prepared)

    def defers(self, prepared: PreparedModule) -> bool:
        """True while I runs, if the weight gradients of `prepared` may wait for W."""
        return self._phase is Phase.INPUT and prepared not in self._at_once

    def defers_compiled(self, prepared: PreparedModule, num_calls: int) -> bool:
        """The same of a module in a compiled part, all of whose calls have come."""
        if self._phase is not Phase.INPUT or prepared not in self._compiled:
            return False
        for p in prepared.parameters.values():  # the search counted one use, that of the tap
            self._counts[id(p)] += num_calls - 1
        return True

    def hold(
        self,
        prepared: PreparedModule,
        rule: SplitRule,
        weight: Tensor,
        bias: Tensor | None,
        g: Tensor,
        x: Tensor,
        cast_weight: Tensor,
        casts: tuple[Any, Any] | None,
        needs: tuple[bool, bool],
    ) -> None:
        """Keep what W needs of one call. `g` itself is kept, not a view of it: nobody then takes it over."""
        x, uses = x.detach(), self._uses
        if needs[0]:
            uses[id(weight)] = uses.get(id(weight), 0) + 1
        if needs[1]:
            uses[id(bias)] = uses.get(id(bias), 0) + 1
        self._held.append(DeferredCall(rule, weight, bias, g, x, cast_weight, casts, needs, g._version, x._version))
        prepared.stage.call_counts.deferred(prepared, x)

    def _without_grad(self) -> list[Tensor]:
        """The parameters that do not wait and have no `.grad` yet."""
        there = [stage.others for stage in self._stages]
        there += [
            prepared.parameters
            for prepared, deferred in self.routes.items()
            if not deferred or prepared in self._at_once
        ]
        return [p for parameters in there for p in parameters.values() if p.grad is None]

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
        """W: compute the deferred weight gradients, add them to `.grad`, free everything."""
        if self._phase is not Phase.HOLDING:
            raise SplitError(
                f"backward_weight was called {self._phase.value}; call backward_input (I) first, and "
                "backward_weight (W) once"
            )
        self._phase = Phase.DONE
        for stage in self._stages:
            stage.done(self)
        held, self._held = self._held, []
        if held:
            with torch.no_grad():
                self._compute(held)

    def spread(self, parameters: set[int]) -> None:
        """Adds to some parameters, by id, those that share a held call with them."""
        for h in self._held:
            own = {id(h.weight), id(h.bias)} if h.bias is not None else {id(h.weight)}
            if own & parameters and all(self._is_complete(p) for p in own):
                parameters |= own

    def add(self, parameters: set[int]) -> None:
        """Computes what is held of some parameters, by id, before W comes, and adds it to `.grad`."""
        now = [h for h in self._held if self._is_complete(id(h.weight)) and {id(h.weight), id(h.bias)} & parameters]
        if now:
            chosen = {id(h) for h in now}
            self._held = [h for h in self._held if id(h) not in chosen]
            with torch.no_grad(), without_autocast(now[0].x.device.type):
                self._compute(now)

    def _is_complete(self, p: int) -> bool:
        """Whether all uses of a parameter in this microbatch have their gradients: then autograd adds their sum."""
        return self._phase is not Phase.INPUT or self._uses.get(p, 0) >= self._counts.get(p, 0)

    def _compute(self, held: list[DeferredCall]) -> None:
        accumulator = Accumulator(self._uses)
        while held:
            # What I kept last is still in cache, and its memory is given back in order.
            rule, weight, bias, g, x, cast_weight, casts, needs, g_version, x_version = held.pop()
            if g._version != g_version or x._version != x_version:
                raise SplitError(
                    "an input or output gradient of a stage was modified in place between I and W, "
                    f"which still needs it (shapes {tuple(x.shape)} and {tuple(g.shape)}); modify a "
                    "copy, or run W first"
                )
            gw, gb = rule.weight_grads(g, x, cast_weight, bias, needs, accumulator.workspace(weight))
            if gw is not None:
                accumulator.add(weight, gw, None if casts is None else casts[0])
            if gb is not None and bias is not None:
                accumulator.add(bias, gb, None if casts is None else casts[1])

    @property
    def deferred_bytes(self) -> int:
        """Bytes still held for W; a memory that several modules share counts once."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for h in self._held for t in (h.g, h.x)}
        return sum(storage.nbytes() for storage in storages.values())


def _roots(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
    return [(y, g) for y, g in zip(outputs, grads) if y.requires_grad and (g is not None or y.numel() == 1)]
