"""Runs the ops of one stage: forward, backward, and the two halves of a split backward.

For each microbatch between its F and its backward it keeps the stage's inputs and outputs (their autograd
graph is the held activation); between I and W only what the deferred weight gradients need.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.message import Payload
from penstock.runtime.microbatches import Microbatches
from penstock.runtime.rng import mix
from penstock.runtime.split import Tape
from penstock.runtime.stage import Stage
from penstock.runtime.tree import can_need_grad, flatten, unflatten

_IN_PLACE = "a leaf Variable that requires grad"


@dataclass
class Held:
    """A microbatch between its F and its backward: leaves that want a gradient, outputs that get one."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    tape: Tape | None
    deferred: bool = field(default=False)


@dataclass(frozen=True)
class StepSettings:
    """What one step asks of every stage.

    Attributes:
        microbatches: the batch, cut.
        seed: of this step; None where nothing random may run (evaluation).
        training: whether a backward follows.
        split: (stage, microbatch) pairs whose backward is split into I and W.
    """

    microbatches: Microbatches
    seed: int | None
    training: bool
    split: frozenset[tuple[int, int]]


class StageRunner:
    """One stage on this rank.

    Args:
        can_split: whether I and W can run apart; where not, I runs the full backward and W does nothing.
        autocast: a type for `torch.autocast` around forwards and the loss, or None.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        num_stages: int,
        device: torch.device,
        loss_fn: Callable[..., Tensor] | None,
        autocast: torch.dtype | None,
        can_split: bool,
    ) -> None:
        self.stage = stage
        self.index = index
        self.losses: dict[int, Tensor] = {}
        self.results: dict[int, Any] = {}
        self._is_first, self._is_last = index == 0, index == num_stages - 1
        self._device = device
        self._loss_fn = loss_fn
        self._autocast = autocast
        self._can_split = can_split
        self._copies_input = False
        self._held: dict[int, Held] = {}
        self._settings: StepSettings | None = None

    @property
    def settings(self) -> StepSettings:
        if self._settings is None:
            raise RuntimeFailure(f"stage {self.index} was asked to run outside a step")
        return self._settings

    def begin(self, settings: StepSettings) -> None:
        """Starts a step; whatever a broken step left is dropped."""
        self._settings = settings
        self._held.clear()
        self.losses.clear()
        self.results.clear()

    def forward(self, m: int, received: Payload | None) -> Payload:
        """Runs F and returns what the next stage gets."""
        settings = self.settings
        value, inputs = self._input(m, received)
        if not settings.training:
            with torch.no_grad(), self._casting():
                output = self._call(value, m, inputs)
                if self._is_last:
                    self._keep_result(m, output)
            return self._outgoing(output)[0] if not self._is_last else Payload([])
        tape = Tape() if self._can_split and (self.index, m) in settings.split else None
        with self._casting(), tape.recording() if tape is not None else nullcontext():
            output = self._call(value, m, inputs)
            if self._is_last:
                output = self._loss(m, output)
        payload, outputs = self._outgoing(output)
        self._held[m] = Held(inputs, outputs, tape)
        return payload

    def _input(self, m: int, received: Payload | None) -> tuple[Any, list[Tensor]]:
        """What the stage is called with, and which of it wants a gradient."""
        if received is None:
            leaves, skeleton = flatten(self.settings.microbatches.inputs[m])
            return unflatten([leaf.to(self._device) for leaf in leaves], skeleton), []
        leaves = [leaf.to(self._device) for leaf in received.leaves if leaf is not None]
        inputs = []
        if self.settings.training:
            for place, wanted in enumerate(received.needs_grad):
                if wanted:
                    leaves[place] = leaves[place].detach().requires_grad_()
                    inputs.append(leaves[place])
        return unflatten(leaves, received.skeleton), inputs

    def _call(self, value: Any, m: int, inputs: list[Tensor]) -> Any:
        """Calls the stage. A stage that changes its input in place gets a copy, from the first time it tries."""
        if self._copies_input and inputs:
            value = self._copied(value)
        try:
            return self._run(value, m)
        except RuntimeError as error:
            if self._copies_input or not inputs or _IN_PLACE not in str(error):
                raise
            self._copies_input = True
            return self._run(self._copied(value), m)

    def _run(self, value: Any, m: int) -> Any:
        seed = self.settings.seed
        return self.stage(value, None if seed is None else mix(seed, m))

    @staticmethod
    def _copied(value: Any) -> Any:
        leaves, skeleton = flatten(value)
        return unflatten([leaf.clone() if leaf.requires_grad else leaf for leaf in leaves], skeleton)

    def _casting(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def _target(self, m: int) -> Any:
        leaves, skeleton = flatten(self.settings.microbatches.targets[m])
        return unflatten([leaf.to(self._device) for leaf in leaves], skeleton)

    def _loss(self, m: int, output: Any) -> Tensor:
        if self._loss_fn is None:
            raise RuntimeFailure("this pipeline has no loss_fn; give one to ps.Pipeline to train")
        loss = self._loss_fn(output, self._target(m))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise RuntimeFailure(f"loss_fn must return one number as a tensor, it returned {got}")
        loss = loss * self.settings.microbatches.scales[m]
        self.losses[m] = loss.detach()
        return loss

    def _keep_result(self, m: int, output: Any) -> None:
        if self._loss_fn is not None and self.settings.microbatches.targets[m] is not None:
            self._loss(m, output)
        else:
            self.results[m] = output

    def _outgoing(self, output: Any) -> tuple[Payload, list[Tensor]]:
        leaves, skeleton = flatten(output)
        needs = [leaf.requires_grad and can_need_grad(leaf) for leaf in leaves]
        outputs = [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed]
        return Payload([leaf.detach() for leaf in leaves], skeleton, needs), outputs

    def backward(self, kind: str, m: int, received: Payload | None) -> Payload:
        """Runs B or I and returns the gradients of the stage's inputs."""
        held = self._held[m]
        grads: list[Tensor | None]
        if received is None:
            grads = [None] * len(held.outputs)
        else:
            grads = [None if g is None else g.to(self._device) for g in received.leaves]
        if len(grads) != len(held.outputs):
            raise RuntimeFailure(
                f"stage {self.index} got {len(grads)} gradients for {len(held.outputs)} outputs of microbatch {m}"
            )
        pairs = [(o, g) for o, g in zip(held.outputs, grads, strict=True) if g is not None or received is None]
        if pairs:
            outputs, gradients = [p[0] for p in pairs], [p[1] for p in pairs]
            if held.tape is not None:
                held.tape.backward_input(outputs, gradients)
                held.deferred = True
            else:
                torch.autograd.backward(outputs, gradients)
        payload = Payload.gradients([leaf.grad for leaf in held.inputs])
        held.inputs, held.outputs = [], []
        if kind == "B":
            del self._held[m]
        return payload

    def backward_weight(self, m: int) -> None:
        """Runs W: the weight gradients that I put off."""
        held = self._held.pop(m)
        if held.tape is not None and held.deferred:
            held.tape.backward_weight()
