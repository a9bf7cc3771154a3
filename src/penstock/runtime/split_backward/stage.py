"""What the prepared modules of one stage share: which parameters wait, for whom, and who else sees their gradients.

A gradient that waits for its W is added to `.grad` late. If autograd adds another gradient to the same parameter in
the meantime, that comes too early. This happens with a second use in a later microbatch, a checkpoint's own backward,
or a whole backward (B) among split ones. So each waiting parameter is watched at its node in the graph, where
gradients of any kind arrive. Before one is added, what waits in the stage is added.

    I0: W0 to come      I1: W1 to come      I2: autograd brings a gradient of a parameter     W0, W1: nothing left
                                                for which W0 or W1 waits
                                            -> W0 and W1, then the gradient

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

from penstock.runtime.tensors.dtensor import local

if TYPE_CHECKING:
    from penstock.runtime.split_backward.prepared import PreparedModule
    from penstock.runtime.split_backward.rules import Needs, SplitRule
    from penstock.runtime.split_backward.tape import Tape


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
    convolution or embedding has is an estimate: each of its entries is taken to need as much as an entry of the layer
    whose entries need most.

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


Edges: TypeAlias = tuple[tuple[Any, int], ...]
"""Of a node in the graph, those that lead to its inputs' nodes."""

ACCUMULATE: type[Any] = type(get_gradient_edge(torch.zeros((), requires_grad=True, device="cpu")).node)
"""The type of the node where a leaf's gradient is added to its `.grad`."""


class SplitError(RuntimeError):
    """A tape was used out of order, what it held for W was overwritten, or a compiled part cannot be split."""


class HeldCall(NamedTuple):
    """The tensors of one call from which W computes: the output's gradient, the input, and the op's own weight.

    Attributes:
        weight, bias: the parameters whose gradients are computed. casts: the nodes that cast them for autocast.
        needs: which of the two.
        g_version, x_version: by which a change in place since I is noticed.
    """

    rule: SplitRule
    weight: Tensor
    bias: Tensor | None
    casts: tuple[Any, Any]
    g: Tensor
    x: Tensor
    used_weight: Tensor
    needs: Needs
    g_version: int
    x_version: int


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
        parameters: all of them, by name.
        others: the parameters of no prepared module, by name: their gradients are computed in I.
        compiled: the prepared modules in parts that torch.compile has taken over; of these, biases are among the
            others.
        with_options: the prepared modules whose rules are made anew in each step.
        deferred: by prepared module, the work on weight gradients that waits for W, in multiply-adds.
        at_once: the same of what is computed in I.
        in_graph: the modules whose weight gradients a compiled backward has computed, if it called them at all.
    """

    def __init__(self) -> None:
        self.recomputing: Tape | None = None
        self.parameters: dict[str, Tensor] = {}
        self.others: dict[str, Tensor] = {}
        self.compiled: dict[PreparedModule, None] = {}
        self.compiled_biases: set[str] = set()
        self.with_options: dict[PreparedModule, None] = {}
        self.deferred: Counter[PreparedModule] = Counter()
        self.at_once: Counter[PreparedModule] = Counter()
        self.in_graph: dict[PreparedModule, None] = {}
        self._is_counted = False
        self._is_new_step = False
        # The tapes between their I and W, in the order of their Is, each with the copy of the stage that it is of.
        # Not held here: a step that broke has no Ws.
        self._tapes: weakref.WeakKeyDictionary[Tape, int] = weakref.WeakKeyDictionary()
        self._copy = 0
        self._watched: dict[Any, int] = {}
        self._watches: dict[int, WatchedParameter] = {}

    def __reduce__(self) -> tuple[type[SplitStage], tuple[()]]:
        # A copy of a module, or a pickled one, has parameters of its own, and nothing waits.
        return SplitStage, ()

    def begin(self, copy: Any) -> None:
        """Starts a copy's step, with the options that its modules have now. What still waits, of one that broke, is
        never added.
        """
        for prepared in self.with_options:
            prepared.follow_options()
        self.turn_to(copy)
        for tape in self._waiting():
            del self._tapes[tape]
        self._is_new_step = True

    def record(self) -> None:
        """Another microbatch of a split backward is recorded. The first one of a step forgets the work before it."""
        if self._is_new_step:
            self._is_new_step = False
            self.deferred, self.at_once, self.in_graph = Counter(), Counter(), {}
        self._is_counted = True

    def share(self) -> DeferredShare | None:
        """What the last step put off to W; None before one did."""
        if not self._is_counted:
            return None
        reasons: dict[str, dict[str, None]] = {}
        for prepared in (*self.at_once, *self.in_graph):
            reasons.setdefault(prepared.reason, {}).update(dict.fromkeys(prepared.parameters))
        uncounted = {name: p for name, p in self.others.items() if p.requires_grad}
        for name in uncounted:
            reasons.setdefault(COMPILED if name in self.compiled_biases else NO_RULE, {})[name] = None
        for prepared in self.in_graph:
            uncounted |= prepared.parameters
        counted = (self.deferred + self.at_once).items()
        each = max((work // local(known.module._parameters["weight"]).numel() for known, work in counted), default=0)
        return DeferredShare(
            self.deferred.total(),
            self.at_once.total() + each * sum(local(p).numel() for p in uncounted.values()),
            {reason: tuple(names) for reason, names in reasons.items()},
        )

    # -- who sees a gradient ---------------------------------------------------------------------------------

    def hooked(self, parameters: Collection[int]) -> bool:
        """Whether somebody else is to see the gradient of a watched parameter, by id, when autograd has it."""
        for each in parameters:
            p, _, before, after, _ = self._watches[each]
            if len(before) > 1 or after or p._backward_hooks or p._post_accumulate_grad_hooks:
                return True
        return False

    def watched(self, edges: Edges) -> list[int]:
        """Watches the parameters to which the edges of a module's node lead; returns their ids."""
        found = []
        for node, _ in edges:
            if node is not None:
                while type(node) is not ACCUMULATE:  # its cast, its transpose
                    node = node.next_functions[0][0]
                found.append(self._watch(node))
        return found

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
        self.compiled.clear()

    # -- what waits ------------------------------------------------------------------------------------------

    def turn_to(self, copy: Any) -> None:
        """Before a backward of one of several copies of the stage that are this one module: each has gradients of
        its own, and the others' are not added to them.
        """
        self._copy = id(copy)

    def wait(self, tape: Tape) -> None:
        """A microbatch's I runs, and its W is to come."""
        self._tapes[tape] = self._copy

    def done(self, tape: Tape) -> None:
        """A microbatch's W runs."""
        self._tapes.pop(tape, None)

    def add_first(self, parameters: Collection[int]) -> None:
        """Adds what waits in this copy, if any of these parameters, by id, waits: another gradient is coming."""
        tapes = self._waiting()
        if any(tape.holds(parameters) for tape in tapes):
            for tape in tapes:
                tape.add()

    def _waiting(self) -> list[Tape]:
        return [tape for tape, copy in self._tapes.items() if copy == self._copy]


def _nothing(*_: object) -> None: ...
