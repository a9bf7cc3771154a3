"""A model's own forward, with the random draws that it has when it is cut into stages.

Stages seed torch's generators before each layer. So a model draws the same for any number of stages, if its own
forward is seeded at the same places: at its start, and at each call of a layer, by hooks that last for the call.

    cut            seed 0 | x * 2 | seed 1: layer | relu | seed 2: layer | ...
    own forward    seed 0 | x * 2 | seed 1: layer | relu | seed 2: layer | ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.cost.cut import PartitionError
from penstock.runtime.partitioning.layers import opened_modules
from penstock.runtime.partitioning.program import ModelTracer
from penstock.runtime.partitioning.source_line import Untraceable
from penstock.runtime.stage.module_state import untouched
from penstock.runtime.stage.split_backward import is_compiled
from penstock.runtime.stage.stage import WHOLE, Calling, Stage, with_arguments
from penstock.runtime.tensors.pytree import device_of, flatten, unflatten
from penstock.runtime.tensors.rng import mix, restored, seed_generators


class WholeModel(Stage):
    """The only stage of a model: calls the model's own forward.

    Args:
        model: the model.
        calling: how the model is called with its inputs.
        tracing: how the model's forward was traced. Default: it is traced if its first forward draws. A model that
            can't be traced counts as one layer, as no other number of stages can run it.
    """

    def __init__(
        self, model: nn.Module, calling: Calling = with_arguments, tracing: ModelTracer | None = None
    ) -> None:
        super().__init__({WHOLE: model}, [0], calling)
        self._tracing = tracing
        self._draws: dict[bool, bool] = {} if tracing is None else {False: True, True: True}
        """Whether the forward draws: in training mode by True, in evaluation mode by False."""

    def forward(self, value: Any, seed: int | None = None) -> Any:
        """Runs the model. With the seed of this step and microbatch, the model draws what its stages would draw."""
        (model,) = self.in_order
        if seed is None:
            return self._calling(model, value)
        leaves, skeleton = flatten(value)
        device = device_of(leaves)
        if self.training not in self._draws:
            self._draws[self.training] = self._has_drawn(leaves, skeleton, device)
        layers = self._layers_called(model, skeleton) if self._draws[self.training] else []
        seed_generators(mix(seed, 0), device)
        with _seeding(layers, seed, device):
            return self._calling(model, value)

    def _has_drawn(self, leaves: Sequence[Tensor], skeleton: Any, device: torch.device) -> bool:
        """Runs the forward once and returns whether it draws. Puts back the model's state and gradients.

        A model that draws nothing is never traced. One that draws has filled its own caches before it is traced.
        """
        (model,) = self.in_order
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        copies = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        with untouched(model), restored(device) as has_drawn:
            try:
                for parameter, _ in gradients:
                    parameter.grad = None
                self._calling(model, unflatten(copies, skeleton))
            except Exception:  # the forward itself raises it next
                return False
            finally:
                for parameter, gradient in gradients:
                    parameter.grad = gradient
            return has_drawn()

    def _layers_called(self, model: nn.Module, skeleton: Any) -> list[nn.Module]:
        """Returns the layers that the forward calls with inputs of this form; none if it can't be traced."""
        try:
            if self._tracing is None:
                tracing = ModelTracer(model, opened_modules(model))
                tracing.first()
                self._tracing = tracing
            modes = tuple(self.training and module.training for module in self._tracing.opened)
            calls = self._tracing.program(skeleton, self.training, modes).calls
        except (Untraceable, PartitionError):
            return []
        return [model.get_submodule(call.path) for call in calls]


@contextmanager
def _seeding(calls: Sequence[nn.Module], seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the k-th of these calls, counted from 1, begins from seed k. Calls within a layer do not count.

    Compiled layers are left alone, as hooks would have them compiled anew.
    """
    numbers: dict[nn.Module, deque[int]] = {}
    for number, layer in enumerate(calls, start=1):
        if not is_compiled(layer):
            numbers.setdefault(layer, deque()).append(number)
    inside: list[nn.Module] = []

    def enter(layer: nn.Module, args: Any) -> None:
        if not inside and numbers[layer]:
            seed_generators(mix(seed, numbers[layer].popleft()), device)
        inside.append(layer)

    def leave(layer: nn.Module, args: Any, output: Any) -> None:
        inside.pop()

    with ExitStack() as stack:
        for layer in numbers:
            stack.callback(layer.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(layer.register_forward_hook(leave, always_call=True).remove)
        yield
