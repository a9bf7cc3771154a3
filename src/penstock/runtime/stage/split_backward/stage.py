"""What the prepared modules of one stage share: which parameters wait, for whom, and who else sees their gradients.

A gradient that waits for its W is added to `.grad` late. Whatever autograd adds to the same parameter meanwhile
would come too early: a second use in a later microbatch, a checkpoint's own backward, a whole backward (B) among
split ones. So each waiting parameter is watched at its node in the graph, where gradients of any kind come in: before
one that comes, those that wait are added.

    I0: W0 to come      I1: W1 to come      I2: autograd brings a gradient      W0, W1: done for this parameter
                                            -> W0 and W1 of this parameter,
                                               then its own
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from penstock.runtime.stage.split_backward.share import DeferredShare, Tally

if TYPE_CHECKING:
    from penstock.runtime.stage.split_backward.slot import Slot
    from penstock.runtime.stage.split_backward.tape import Tape

Tapes: TypeAlias = "weakref.WeakKeyDictionary[Tape, None]"

ACCUMULATE: type[Any] = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)
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

    @property
    def is_hooked(self) -> bool:
        """Whether somebody else is to see the gradient at the moment autograd has it."""
        p = self.parameter
        return len(self.before) > 1 or bool(self.after or p._backward_hooks or p._post_accumulate_grad_hooks)


class SplitStage:
    """Attributes:
    recomputing: the tape whose I is running. A checkpoint inside the stage then calls the modules again: on CUDA from
        autograd's own thread, where no context variable of ours is seen.
    others: the parameters of no prepared module, by name: their gradients are computed in I.
    compiled: the prepared modules in parts that torch.compile has taken over; of these, biases are among the others.
    tally: counts what waits and what does not.
    """

    def __init__(self) -> None:
        self.recomputing: Tape | None = None
        self.others: dict[str, Tensor] = {}
        self.compiled: dict[Slot, None] = {}
        self.compiled_biases: set[str] = set()
        self.tally = Tally()
        # Between their I and W, in the order of their Is. Not held here: a step that broke has no Ws.
        self._tapes: Tapes = weakref.WeakKeyDictionary()
        # Of every copy of the stage that is this one module.
        self._queues: weakref.WeakKeyDictionary[Any, Tapes] = weakref.WeakKeyDictionary()
        self._watched: dict[Any, int] = {}
        self._watches: dict[int, WatchedParameter] = {}

    def __reduce__(self) -> tuple[type[SplitStage], tuple[()]]:
        # A copy of a module, or a pickled one, has parameters of its own, and nothing waits.
        return SplitStage, ()

    def share(self) -> DeferredShare | None:
        """What the last step put off to W; None before one did."""
        return self.tally.share(self.others, self.compiled_biases) if self.tally.num_tapes else None

    # -- who sees a gradient ---------------------------------------------------------------------------------

    def is_hooked(self, p: Tensor) -> bool:
        """Whether somebody is to see the parameter's gradient at the moment autograd has it."""
        watch = self._watches.get(id(p))
        if watch is not None:
            return watch.is_hooked
        return bool(p._backward_hooks or p._post_accumulate_grad_hooks)

    def hooked(self, parameters: Collection[int]) -> bool:
        """The same of any of several watched parameters, by id."""
        return any(self._watches[p].is_hooked for p in parameters)

    def watch(self, node: Any) -> int:
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
        self.tally.begin()

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
