"""The gradients of tied parameters (`ties.py`), added up on their way with the backwards.

For each microbatch, a plain loop adds the contributions of every use of the parameter, the deepest use first. Here
that sum travels with the backward. Each stage's sum is taken before it reaches `.grad`, and is sent to the next stage
up that shares the parameter, whose backward starts from it. The topmost stage, the owner, adds the whole sum to the
gradient. So the gradient is the same to the bit.

    rank 3, I5 of stage 3 -> sum so far of microbatch 5 -> rank 0, I5 of stage 0 -> owner's gradient

While an op of any other stage runs, a stand-in takes the parameter's place there: a leaf on the same memory, whose
gradient is taken when the op has ended. So hooks on the parameter itself see whole gradients, once per microbatch. It
does not matter which of its stages are in one process, or in which pipelines.

Checkpoints with use_reentrant=True run a backward inside the backward, and a plain loop adds its gradient to `.grad`
ahead of the sum. If the owner's stage does that, the numbers are the same. Other stages refuse it.

If updates are ops, the owner's stage steps the parameter at its own updates. The new value goes to the other stages
with the first forward that passes after that (`transport/wiring.py`). Stand-ins then have memory of their own, one
for each copy of a stage, which holds what the copy's ops are to read (`versioned_parameters.py`).

A tied parameter's gradient is never deferred to W: its hook makes the split backward compute it in I.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import currentframe
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.ties import Ties
from penstock.runtime.stage.autograd import added, run_backward
from penstock.runtime.stage.stage import Copy
from penstock.runtime.tensors.dtensor import as_shard, is_sharded, local
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.tensors.pytree import flatten
from penstock.schedule import Op


class ParameterCast:
    """The cast of a tied parameter in the graph of one microbatch. A plain loop makes it once, for all stages.

    Autocast keeps a parameter's cast for the rest of the forward, so its uses in all stages are uses of one tensor,
    whose gradient is added up in low precision, deepest use first, and becomes float32 once, at the shallowest of
    them:

        plain loop    w -> cast -> stage 3, stage 1     gradient of the cast: bfloat16(g3 + g1); of w: float32 of it
        pipeline      stage 3: w -> cast, g3 (bfloat16) -> stage 1: w -> cast, g3 + g1 (bfloat16) -> stage 0: owner

    So the sum for the cast travels beside the sum for the parameter, which has what uses without a cast give (lookups
    in an embedding). Which stage is the shallowest with a cast is known at the owner alone: until then the sum for
    the parameter is kept both without the cast's part and with it.

    Attributes:
        root: a tensor of the graph. Only the cast lies behind it, and gradients of the cast enter there.
    """

    def __init__(self, root: Tensor, node: Any) -> None:
        self.root, self._node = root, node
        self._taken: Tensor | None = None

    def gradient(self, part: Tensor) -> Tensor:
        """A gradient of the cast as one of `root`."""
        return part.to(self.root.dtype).reshape(self.root.shape)

    def take(self) -> None:
        """Sends the cast's gradient to `taken` from now on, and none to the parameter."""

        def taken(gradients: tuple[Tensor | None, ...]) -> tuple[None]:
            self._taken = gradients[0]
            return (None,)

        self._node.register_prehook(taken)

    @property
    def taken(self) -> Tensor | None:
        return self._taken

    @property
    def node(self) -> Any:
        """The cast in the graph."""
        return self._node


class DirectUses:
    """The uses of a parameter in the graph of one microbatch, without those of its cast.

    Autograd runs the nodes of a graph in the reverse of the order in which they were made.
    """

    def __init__(self, parameter: Tensor, output: Any, cast: ParameterCast | None) -> None:
        self._cast_number = -1 if cast is None else int(cast.node._sequence_nr())
        self._parts: list[tuple[int, Tensor]] = []
        self.num = 0
        leaf = get_gradient_edge(parameter).node
        outputs, _ = flatten(output)
        seen: set[Any] = {each.grad_fn for each in outputs if each.grad_fn is not None}
        pending: list[Any] = list(seen)
        for node in pending:  # runs for every microbatch, since each may use the parameter elsewhere: keep it short
            for place, (following, _) in enumerate(node.next_functions):
                if following is leaf:
                    if cast is None or node is not cast.node:
                        self.num += 1
                        self._watch(node, place)
                elif following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)

    def _watch(self, node: Any, place: int) -> None:
        def note(inputs: tuple[Tensor | None, ...], _: Any) -> None:
            if (part := inputs[place]) is not None:
                self._parts.append((int(node._sequence_nr()), part))

        node.register_hook(note)

    def with_uses(self, start: Tensor | None, part: Tensor | None = None) -> Tensor | None:
        """Adds the gradients of these uses to a sum in autograd's order; the cast's part comes in its place."""
        total, left = start, part
        for number, each in self._parts:
            if left is not None and number < self._cast_number:
                total, left = added(total, left), None
            total = added(total, each)
        return added(total, left)


@dataclass(frozen=True)
class TiedGradientSum:
    """The gradient of a tied parameter in one microbatch, as far as stages have added to it.

    Attributes:
        direct: of the parameter itself. cast: of its cast.
        both: of the parameter with the cast's part in its place, if no stage above has a cast; None if it comes last.
    """

    direct: Tensor | None = None
    cast: Tensor | None = None
    both: Tensor | None = None

    @classmethod
    def of(cls, payload: Payload) -> TiedGradientSum:
        return cls(*payload.leaves)

    def payload(self) -> Payload:
        direct = None if self.direct is None else local(self.direct)
        return Payload.gradients([direct] if self.cast is None else [direct, self.cast, self.both])

    def whole(self) -> Tensor | None:
        """The gradient of the parameter, if no stage above has a cast."""
        if self.cast is None or self.both is not None:
            return self.direct if self.cast is None else self.both
        return added(self.direct, self.cast.float())  # autocast casts what is float32 alone

    def after(
        self, direct: Tensor | None, cast: ParameterCast | None, uses: DirectUses | None, name: str, stage: int
    ) -> TiedGradientSum:
        """Returns the sum after a stage's backward.

        Args:
            direct: the sum with the stage's direct uses. cast: the stage's cast.
            name: of the parameter in the stage.

        Raises:
            RuntimeFailure: the stage has uses that the graph of its forward does not show.
        """
        expected = self.direct if uses is None else uses.with_uses(self.direct)
        as_seen = torch.equal(expected, direct) if expected is not None and direct is not None else expected is direct
        if not as_seen:
            raise RuntimeFailure(
                f"{name} is shared by stages, and stage {stage} uses it under autocast in a way that the graph of "
                "its forward does not show (as its output, say), and its gradient would be added up in another order "
                "than in a plain loop; untie it, or keep its uses out of autocast"
            )
        if cast is None:
            both = self.both
            if uses is not None and uses.num and self.cast is not None:
                both = uses.with_uses(self.whole())
            return TiedGradientSum(direct, self.cast, both)
        if uses is None or not uses.num or cast.taken is None:
            return TiedGradientSum(direct, cast.taken)
        return TiedGradientSum(direct, cast.taken, uses.with_uses(self.direct, cast.taken.float()))


def cast_of(parameter: Tensor) -> ParameterCast | None:
    """Finds the cast that a forward made of a parameter. Call it after the forward, inside the same autocast."""
    if not parameter.requires_grad or parameter.dtype is not torch.float32 or is_sharded(parameter):
        return None
    if parameter.dim() == 0 or not torch.is_autocast_cache_enabled():
        return None
    with torch.enable_grad():
        mark = torch.zeros((), requires_grad=True, device="cpu") * 1
        # An op of lower precision finds the cast that is kept, and makes one where there is none.
        shape = (parameter.shape[-1],) if parameter.dim() == 1 else (parameter.shape[-1], 0)
        probe = torch.matmul(parameter, torch.zeros(shape, device=parameter.device, requires_grad=True))
    node: Any = probe.grad_fn
    while not hasattr(node, "_saved_self"):
        node = node.next_functions[0][0]
    root: Tensor = node._saved_self
    node = root.grad_fn
    while node is not None and type(node.next_functions[0][0]).__name__ != "AccumulateGrad":
        node = node.next_functions[0][0]
    if node is None or mark.grad_fn is None or node._sequence_nr() > mark.grad_fn._sequence_nr():
        return None
    return ParameterCast(root, node)


class StandIn:
    """Takes a parameter's place in the modules of a stage while an op of the stage runs.

    Args:
        separate: whether it has memory of its own.
    """

    def __init__(self, stage: nn.Module, parameter: Parameter, separate: bool = False) -> None:
        self._parameter, self._separate = parameter, separate
        self._places = [
            (module, name)
            for module in stage.modules()
            for name, own in module._parameters.items()
            if own is parameter
        ]
        self.leaf = self._made()

    def _made(self) -> Parameter:
        value = self._parameter.detach()
        leaf = Parameter(value.clone() if self._separate else value, self._parameter.requires_grad)
        leaf.__dict__.update(self._parameter.__dict__)
        if leaf.requires_grad:
            # A parameter with a hook is not deferred by the split backward.
            leaf.register_post_accumulate_grad_hook(_require_one_backward)
        return leaf

    def take(self) -> Tensor | None:
        """Returns the gradient that an op's backward gave, and clears it."""
        total, self.leaf.grad = self.leaf.grad, None
        return total

    def begin(self) -> None:
        """Starts a step: takes over the parameter's memory, type and `requires_grad`."""
        known, now = self.leaf, self._parameter
        same_memory = local(known).data_ptr() == local(now).data_ptr() and known.shape == now.shape
        if self._separate:
            known.requires_grad_(now.requires_grad)
        elif not same_memory or known.requires_grad != now.requires_grad or known.dtype != now.dtype:
            self.leaf = self._made()
        self.leaf.grad = None

    def enter(self) -> None:
        for module, name in self._places:
            setattr(module, name, self.leaf)  # by setattr, so that a recurrent layer notices

    def leave(self) -> None:
        for module, name in self._places:
            setattr(module, name, self._parameter)


def _require_one_backward(leaf: Tensor) -> None:
    """Raises RuntimeFailure if the gradient comes from a backward inside the op's, as of reentrant checkpoints.

    A plain loop adds such a gradient to `.grad` at once, ahead of the sum over stages.
    """
    for frame, _ in walk_stack(currentframe()):
        starts = frame.f_code is torch.autograd.backward.__code__
        if starts and (frame.f_back is None or frame.f_back.f_code is not run_backward.__code__):
            raise RuntimeFailure(
                "a stage uses a parameter that it shares with a lower one inside a checkpoint with "
                "use_reentrant=True, which adds up gradients in another order than a plain loop; give the checkpoint "
                "use_reentrant=False"
            )


class TiedGradients:
    """Takes, passes on and sums the gradients of tied parameters in this process.

    Args:
        stages: those in this process, by number. copies: (pipeline, stage) of their copies in this process.
    """

    def __init__(self, ties: Ties, stages: Mapping[int, nn.Module], copies: Iterable[Copy]) -> None:
        self._ties, self._stages = ties, stages
        self._local: dict[tuple[int, int], Parameter] = {}
        by_stage: dict[int, list[tuple[int, StandIn]]] = {}
        self._from_below: dict[int, list[int]] = {}
        for slot, tie in ties.slots():
            for stage, name in tie.names.items():
                if stage not in stages:
                    continue
                parameter = stages[stage].get_parameter(name)
                self._local[slot, stage] = parameter
                if stage != tie.owner:
                    by_stage.setdefault(stage, []).append((slot, StandIn(stages[stage], parameter)))
                if stage != tie.stages[-1]:
                    self._from_below.setdefault(stage, []).append(slot)
        self._stand_ins: dict[Copy, list[tuple[int, StandIn]]] = {
            (k, stage): by_stage[stage] for k, stage in copies if stage in by_stage
        }
        self._here: dict[int, StandIn] = {}
        """By slot, the stand-ins of the copy whose op runs."""
        self._taken: dict[tuple[int, int], TiedGradientSum] = {}
        self._came: dict[tuple[int, int], TiedGradientSum] = {}
        self._casts: dict[tuple[int, int, int], ParameterCast] = {}
        self._uses: dict[tuple[int, int, int], DirectUses] = {}
        self._handles: dict[int, Any] = {}

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def separate(self) -> None:
        """Gives every copy of a stage its own values of the parameters that other stages own, as updates are ops."""
        for (k, stage), found in self._stand_ins.items():
            self._stand_ins[k, stage] = [
                (slot, StandIn(self._stages[stage], self._local[slot, stage], separate=True)) for slot, _ in found
            ]

    def read_by(self, copy: Copy) -> dict[int, Parameter]:
        """By slot, the parameter that a copy reads in place of one that another stage owns."""
        return {slot: stand_in.leaf for slot, stand_in in self._stand_ins.get(copy, ())}

    def begin(self) -> None:
        """Starts a step."""
        self._taken.clear()
        self._came.clear()
        self._casts.clear()
        self._uses.clear()
        for found in self._stand_ins.values():
            for _, stand_in in found:
                stand_in.begin()
        for parameter in self._local.values():
            if parameter.requires_grad and id(parameter) not in self._handles:
                self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(_nothing)

    @contextmanager
    def inside(self, pipeline: int, stage: int) -> Iterator[None]:
        """Around an op of a copy of a stage."""
        self._here = found = dict(self._stand_ins.get((pipeline, stage), ()))
        try:
            for stand_in in found.values():
                stand_in.enter()
            yield
        finally:
            self._here = {}
            for stand_in in found.values():
                stand_in.leave()

    def note_casts(self, stage: int, m: int, output: Any) -> None:
        """Finds the casts of tied parameters and their other uses. Call it after a forward, inside its autocast."""
        stand_ins = self._here
        for (slot, own), parameter in self._local.items():
            if own == stage:
                leaf = stand_ins[slot].leaf if slot in stand_ins else parameter
                cast = cast_of(leaf)
                if cast is not None:
                    self._casts[slot, stage, m] = cast
                if slot in stand_ins and leaf.requires_grad:
                    uses = DirectUses(leaf, output, cast)
                    if uses.num:
                        self._uses[slot, stage, m] = uses

    def sort(self, op: Op, received: Sequence[Payload]) -> tuple[Sequence[Payload], list[tuple[Tensor, Tensor]]]:
        """Separates the gradients of outputs from the tied sums, which follow them, by slot.

        Returns:
            The gradients of outputs, and more starts of the backward: (tensor of its graph, gradient).
        """
        slots = self._from_below.get(op.stage, ())
        main = len(received) - len(slots)
        stand_ins = self._here
        starts: list[tuple[Tensor, Tensor]] = []
        for slot, payload in zip(slots, received[main:], strict=True):
            self._came[slot, op.stage] = came = TiedGradientSum.of(payload)
            cast = self._casts.get((slot, op.stage, op.microbatch))
            parameter = stand_ins[slot].leaf if slot in stand_ins else self._local[slot, op.stage]
            if not parameter.requires_grad:
                continue
            direct = came.direct
            if slot not in stand_ins and cast is None:
                direct = came.whole()
            if direct is not None:
                starts.append((parameter, as_shard(direct, parameter)))
            if came.cast is not None and cast is not None:
                starts.append((cast.root, cast.gradient(came.cast)))
        for slot in stand_ins:
            if (cast := self._casts.get((slot, op.stage, op.microbatch))) is not None:
                cast.take()
        return received[:main], starts

    def take(self, op: Op) -> None:
        """Takes this microbatch's sums after a backward, unless this stage is the owner."""
        for slot, stand_in in self._here.items():
            key = slot, op.stage, op.microbatch
            direct, came = stand_in.take(), self._came.pop(key[:2], None) or TiedGradientSum()
            cast, uses = self._casts.pop(key, None), self._uses.pop(key, None)
            name = self._ties[slot - 1].names[op.stage]
            if cast is None and came.cast is None:
                self._taken[key[:2]] = TiedGradientSum(direct)
            else:
                self._taken[key[:2]] = came.after(direct, cast, uses, name, op.stage)
        if self._casts:
            for key in [key for key in self._casts if key[1:] == (op.stage, op.microbatch)]:
                del self._casts[key]

    def give(self, edge: Edge) -> Payload:
        """The sum so far, for the next stage up."""
        return self._taken.pop((edge.slot, edge.producer.stage), TiedGradientSum()).payload()


def _nothing(_: Tensor) -> None:
    """A hook that does nothing. A parameter with a hook has its gradient computed in I."""
