"""What the prepared modules of one stage share: which parameters wait, for whom, and who else sees their gradients.

A gradient that waits for its W is added to `.grad` late. If autograd adds another gradient to the same parameter in
the meantime, that comes too early. This happens with a second use in a later microbatch, a checkpoint's own backward,
or a whole backward (B) among split ones. So each waiting parameter is watched at its node in the graph, where
gradients of any kind arrive. Before one is added, those that wait are added.

    I0: W0 to come      I1: W1 to come      I2: autograd brings a gradient      W0, W1: done for this parameter
                                            -> W0 and W1 of this parameter,
                                               then its own

A `DeferredShare` says how much of the stage's work on weight gradients waits for W, in multiply-adds, and why the
rest does not.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from penstock.runtime.stage.split_backward.prepared_module import PreparedModule
    from penstock.runtime.stage.split_backward.tape import Tape


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


class CallCounts:
    """Counts a stage's calls by the shapes of their inputs. The first microbatch of a step forgets those before."""

    def __init__(self) -> None:
        self._stale = False
        self._deferred: Counter[tuple[PreparedModule, torch.Size]] = Counter()
        self._at_once: Counter[tuple[PreparedModule, torch.Size]] = Counter()
        self._in_graph: Counter[PreparedModule] = Counter()
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

    def deferred(self, prepared: PreparedModule, x: Tensor) -> None:
        """A call whose weight gradient waits for W."""
        self._deferred[prepared, x.shape] += 1

    def at_once(self, prepared: PreparedModule, x: Tensor) -> None:
        """A call whose weight gradient is computed in I."""
        self._at_once[prepared, x.shape] += 1

    def in_graph(self, prepared: PreparedModule) -> None:
        """A microbatch in which a compiled backward computed a module's weight gradient, if it was called at all."""
        self._in_graph[prepared] += 1

    def share(self, others: Mapping[str, Tensor], compiled: Collection[str] = ()) -> DeferredShare:
        """What was counted.

        Args:
            others: the parameters of no prepared module.
            compiled: of these the names of biases of prepared modules in compiled parts.
        """
        reasons: dict[str, dict[str, None]] = {}
        for prepared in [*(prepared for prepared, _ in self._at_once), *self._in_graph]:
            reasons.setdefault(prepared.reason, {}).update(dict.fromkeys(prepared.parameters))
        wanted = {name: p for name, p in others.items() if p.requires_grad}
        for name in wanted:
            reasons.setdefault(COMPILED if name in compiled else NO_RULE, {})[name] = None
        rows = max(
            (prepared.rule.rows(_like(shape)) for prepared, shape in [*self._deferred, *self._at_once]), default=0
        )
        rest = rows * self.num_tapes * sum(p.numel() for p in wanted.values())
        rest += rows * sum(times * prepared.weight.numel() for prepared, times in self._in_graph.items())
        return DeferredShare(
            _work(self._deferred),
            _work(self._at_once) + rest,
            {reason: tuple(names) for reason, names in reasons.items()},
        )


def _work(calls: Mapping[tuple[PreparedModule, torch.Size], int]) -> int:
    return sum(
        times * prepared.rule.work(_like(shape), prepared.weight) for (prepared, shape), times in calls.items()
    )


def _like(shape: torch.Size) -> Tensor:
    return torch.empty(shape, device="meta")


Tapes: TypeAlias = "weakref.WeakKeyDictionary[Tape, None]"
Edges: TypeAlias = tuple[tuple[Any, int], ...]
"""Of a node in the graph, those that lead to its inputs' nodes."""

ACCUMULATE: type[Any] = type(get_gradient_edge(torch.zeros((), requires_grad=True, device="cpu")).node)
"""The type of the node where a leaf's gradient is added to its `.grad`."""


class SplitError(RuntimeError):
    """A tape was used out of order, what it held for W was overwritten, or a compiled part cannot be split."""


class WatchedParameter(NamedTuple):
    """A parameter, its node in the graph, and the hooks there: before it is run ours among others', and after it."""

    parameter: Tensor
    node: Any
    before: Any
    after: Any
    handle: Any


class SplitStage:
    """A stage whose backward is split into I and W.

    Attributes:
        recomputing: the tape whose I is running. A checkpoint inside the stage then calls the modules again: on CUDA
            from autograd's own thread, where no context variable of ours is seen.
        others: the parameters of no prepared module, by name: their gradients are computed in I.
        compiled: the prepared modules in parts that torch.compile has taken over; of these, biases are among the
            others.
        call_counts: counts what waits and what does not.
    """

    def __init__(self) -> None:
        self.recomputing: Tape | None = None
        self.others: dict[str, Tensor] = {}
        self.compiled: dict[PreparedModule, None] = {}
        self.compiled_biases: set[str] = set()
        self.call_counts = CallCounts()
        # Between their I and W, in the order of their Is. Not held here: a step that broke has no Ws.
        self._tapes: Tapes = weakref.WeakKeyDictionary()
        # Of every copy of the stage that is this one module.
        self._queues: weakref.WeakKeyDictionary[Any, Tapes] = weakref.WeakKeyDictionary()
        self._watched: dict[Any, int] = {}
        self._watches: dict[int, WatchedParameter] = {}
        self._known: dict[PreparedModule, tuple[Edges, tuple[int, ...]]] = {}

    def __reduce__(self) -> tuple[type[SplitStage], tuple[()]]:
        # A copy of a module, or a pickled one, has parameters of its own, and nothing waits.
        return SplitStage, ()

    def share(self) -> DeferredShare | None:
        """What the last step put off to W; None before one did."""
        return self.call_counts.share(self.others, self.compiled_biases) if self.call_counts.num_tapes else None

    # -- who sees a gradient ---------------------------------------------------------------------------------

    def hooked(self, parameters: Collection[int]) -> bool:
        """Whether somebody else is to see the gradient of a watched parameter, by id, when autograd has it."""
        for each in parameters:
            p, _, before, after, _ = self._watches[each]
            if len(before) > 1 or after or p._backward_hooks or p._post_accumulate_grad_hooks:
                return True
        return False

    def watched(self, prepared: PreparedModule, edges: Edges) -> tuple[int, ...]:
        """Watches the parameters to which the edges of a module's node lead; returns their ids."""
        known = self._known.get(prepared)
        if known is not None and known[0] == edges:
            return known[1]
        found = []
        for node, _ in edges:
            if node is not None:
                while type(node) is not ACCUMULATE:  # its cast, its transpose
                    node = node.next_functions[0][0]
                found.append(self._watch(node))
        if all(node is None or type(node) is ACCUMULATE for node, _ in edges):  # the same for every microbatch
            self._known[prepared] = edges, tuple(found)
        return tuple(found)

    def _watch(self, node: Any) -> int:
        """Watches the node of a parameter from now on; returns the parameter's id."""
        known = self._watched.get(node)
        if known is not None:
            return known
        p: Tensor = node.variable
        before = self._watches.pop(id(p), None)
        if before is not None:  # moved to another device or type, a parameter gets another node
            before.handle.remove()
            del self._watched[before.node]
        stage = weakref.ref(self)

        def arrive(grads: tuple[Tensor | None, ...]) -> None:
            if grads[0] is not None and (here := stage()) is not None and here._tapes:
                here.add_first({id(p)})

        handle, last = node.register_prehook(arrive), node.register_hook(_nothing)
        self._watches[id(p)] = WatchedParameter(p, node, handle.hooks_dict_ref(), last.hooks_dict_ref(), handle)
        last.remove()
        self._watched[node] = id(p)
        return id(p)

    def release(self) -> None:
        """Watches nothing any more."""
        for watch in self._watches.values():
            watch.handle.remove()
        self._watches.clear()
        self._watched.clear()
        self._known.clear()
        self.compiled.clear()

    # -- what waits ------------------------------------------------------------------------------------------

    def turn_to(self, copy: Any) -> None:
        """Before a backward of one of several copies of the stage that are this one module: each has gradients of
        its own, and the others' are not added to them.
        """
        tapes = self._queues.get(copy)
        self._tapes = self._queues.setdefault(copy, weakref.WeakKeyDictionary()) if tapes is None else tapes

    def wait(self, tape: Tape) -> None:
        """A microbatch's I runs, and its W is to come."""
        self._tapes[tape] = None

    def done(self, tape: Tape) -> None:
        for tapes in (self._tapes, *self._queues.values()):
            tapes.pop(tape, None)

    def begin(self, copy: Any) -> None:
        """Starts a copy's step. What still waits, of one that broke, is never added."""
        self.turn_to(copy)
        self._tapes.clear()
        self.call_counts.begin()

    @property
    def waits(self) -> bool:
        return bool(self._tapes)

    def add_first(self, parameters: Collection[int]) -> None:
        """Adds what waits of these parameters, by id, and of those that they share a module with."""
        tapes = list(self._tapes)
        wanted = set(parameters)
        before = 0
        while len(wanted) > before:
            before = len(wanted)
            for tape in tapes:
                tape.spread(wanted)
        for tape in tapes:
            tape.add(wanted)


def _nothing(*_: object) -> None: ...
