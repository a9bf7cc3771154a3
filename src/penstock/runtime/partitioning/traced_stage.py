"""Stages of a traced model: each calls its layers, does what the forward does between them, and passes results on.

`WholeModel` is the only stage of a model that is not cut.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import Parameter
from torch.nn.modules.dropout import _DropoutNd

from penstock.cost.cut import PartitionError
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.partitioning.layers import opened_modules
from penstock.runtime.partitioning.program import ModelTracer
from penstock.runtime.partitioning.tracer import Untraceable, fill, run_call
from penstock.runtime.split_backward import is_compiled
from penstock.runtime.stage.module_state import having, untouched
from penstock.runtime.stage.stage import WHOLE, Calling, Stage, holder_of, with_arguments
from penstock.runtime.tensors.pytree import DTYPES, device_of, flatten, unflatten
from penstock.runtime.tensors.rng import mix, restored, seed_generators

_FORM, _DTYPE, _DEVICE = "form of the inputs", "a type of tensors", "the device of the stage"


class TracedStage(Stage):
    """A stage that runs its part of a traced forward.

    Args:
        tracing: the programs of the whole forward. index: the stage's number.
        layers: path in the model -> layer, in the order in which they are called first.
        tensors: path -> parameter or buffer that the forward itself uses here, or that no stage uses. The latter are
            held as well, so that nothing of the model is lost.
        alias: path -> the path under which this stage has it, if an earlier stage has the same.
    """

    def __init__(
        self,
        tracing: ModelTracer,
        index: int,
        layers: Mapping[str, nn.Module],
        tensors: Mapping[str, Tensor],
        alias: Mapping[str, str],
    ) -> None:
        outer = {
            path: layer
            for path, layer in layers.items()
            if not any(path.startswith(f"{other}.") and alias.get(other, other) == other for other in layers)
        }
        super().__init__({alias.get(path, path): layer for path, layer in outer.items()}, range(len(outer)))
        self._tracing, self._number = tracing, index
        self.earlier_buffers = {alias[p]: p for p in tensors if p in alias and not isinstance(tensors[p], Parameter)}
        self._calls = dict(layers)
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._found = _AsFound()
        for path, tensor in tensors.items():
            self._hold(path, alias.get(path, path), tensor)

    @property
    def around(self) -> dict[str, nn.Module]:
        opened = set(self._tracing.opened)
        return {path: module for path, module in self._tracing.model.named_modules() if module in opened}

    def follow_model(self) -> None:
        """Takes buffers that the user has given the model since, as `model.half()` and `model.mask = other` do."""
        for path, known in self._found.items():
            holder, name = self._places[path]
            owner, last = _owner_of(self._tracing.model, path)
            now = None if owner is None or owner is holder else owner._buffers.get(last)
            if now is not None and now is not known:
                holder._buffers[name] = now if holder._buffers[name] is known else now.clone()
                self._found[path] = now

    def replace(self, old: nn.Module, new: nn.Module) -> None:
        super().replace(old, new)
        self._calls.update({path: new for path, layer in self._calls.items() if layer is old})

    def forward(self, value: Any, seed: int | None = None) -> Any:
        """Runs the stage's part: of the model's inputs, or of what the stage before passed on."""
        number, tracing = self._number, self._tracing
        leaves, skeleton = flatten(value)
        if number > 0:
            value = dict(value)
            skeleton = json.loads(value.pop(_FORM)) if _FORM in value else tracing.skeleton
        device = device_of(leaves)
        program, part = tracing.part(number, skeleton, self.training)
        values: dict[fx.Node, Any] = dict(program.constants)
        if number == 0:
            values[program.inputs] = leaves
            if seed is not None:
                seed_generators(mix(seed, 0), device)
        else:
            values |= {node: _unpacked(value[node.name], device) for node in part.comes}
        values |= {node: getattr(*self._held(self._places, path)) for node, path in part.tensors.items()}
        del value, leaves
        for step, freed in zip(part.steps, part.frees, strict=True):
            if seed is not None and step.meta["layer"] is not None:
                seed_generators(mix(seed, step.meta["number"]), device)
            try:
                values[step] = self._run(step, values)
            except Exception as error:
                error.add_note(f"in stage {number} of the {type(tracing.model).__name__}, at {step.meta['line']}")
                raise
            for node in freed:
                values.pop(node, None)
        if number == len(tracing.begins):
            return fill(program.output, values)
        return self._passed_on(part.goes, values, skeleton)

    def _run(self, step: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if step.meta["no_grad"] and torch.is_grad_enabled():
            with torch.no_grad():
                return self._run(step, values)
        call = step.meta["layer"]
        if call is None:
            return run_call(step, values)
        return self._held(self._calls, call.path)(*fill(step.args, values), **fill(step.kwargs, values))

    def _held(self, where: Mapping[str, Any], path: str) -> Any:
        if path not in where:
            raise RuntimeFailure(
                f"the forward uses {path} in stage {self._number} with these inputs or in this mode, and the stage "
                "does not have it; give ps.split(..., example=) inputs like those of the run"
            )
        return where[path]

    def _passed_on(self, goes: Sequence[fx.Node], values: Mapping[fx.Node, Any], skeleton: Any) -> dict[str, Any]:
        out: dict[str, Any] = {node.name: _packed(values[node]) for node in goes}
        if str(skeleton) != str(self._tracing.skeleton):
            out[_FORM] = json.dumps(skeleton)
        return out

    def _hold(self, path: str, own: str, tensor: Tensor) -> None:
        holder, last = holder_of(self, own)
        if isinstance(tensor, Parameter) and last not in holder._parameters:
            holder.register_parameter(last, tensor)
        elif not isinstance(tensor, Parameter) and last not in holder._buffers:
            owner, name = _owner_of(self._tracing.model, path)
            assert owner is not None
            holder.register_buffer(last, tensor, persistent=name not in owner._non_persistent_buffers_set)
        self._places[path] = holder, last
        self._found[path] = tensor

    def _apply(self, fn: Any, recurse: bool = True) -> TracedStage:
        """Moves the stage to another device or type, and gives the user's model the buffers that are new then."""
        before = {path: getattr(*where) for path, where in self._places.items()}
        super()._apply(fn, recurse)
        for path, (holder, name) in self._places.items():
            owner, last = _owner_of(self._tracing.model, path)
            if owner is not None and owner._buffers.get(last) is before[path]:
                owner._buffers[last] = self._found[path] = getattr(holder, name)
        return self


class _AsFound(dict[str, Tensor]):
    """By path, the model's parameters and buffers that a stage has taken over. Copies of the stage have the same."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _AsFound:
        return _AsFound(self)


def _owner_of(model: nn.Module, path: str) -> tuple[nn.Module | None, str]:
    """Returns the module of a model that has the tensor at a path, or None if it is gone, and the tensor's name."""
    *folders, last = path.split(".")
    owner: nn.Module | None = model
    for folder in folders:
        owner = None if owner is None else owner._modules.get(folder)
    return owner, last


def _packed(value: Any) -> Any:
    """Returns a value in the form in which it travels between stages."""
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    return {_DEVICE: None} if isinstance(value, torch.device) else _mapped(_packed, value)


def _unpacked(value: Any, device: torch.device) -> Any:
    if type(value) is dict and value.keys() <= {_DTYPE, _DEVICE} and value:
        return DTYPES[value[_DTYPE]] if _DTYPE in value else device
    return _mapped(lambda each: _unpacked(each, device), value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns a tuple, list or dict with the function's results for its items, and another value as it is."""
    if type(value) in (tuple, torch.Size):
        return tuple(map(function, value))
    if type(value) is list:
        return list(map(function, value))
    if type(value) is dict:
        return {key: function(each) for key, each in value.items()}
    return value


class WholeModel(Stage):
    """The only stage of a model: calls the model's own forward, with the random draws of several stages.

    Stages seed torch's generators before each layer. So a model draws the same for any number of stages, if its own
    forward is seeded at the same places: at its start, and at each call of a layer, by hooks that last for the call.

        cut            seed 0 | x * 2 | seed 1: layer | relu | seed 2: layer | ...
        own forward    seed 0 | x * 2 | seed 1: layer | relu | seed 2: layer | ...

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
        self._draws: dict[bool, Any] = {} if tracing is None else {False: True, True: True}
        """In training mode by True, in evaluation mode by False: True once a forward has drawn; else the modes and
        dropouts of the modules when one last drew nothing. With others, the next forward may draw.
        """

    def forward(self, value: Any, seed: int | None = None) -> Any:
        """Runs the model. With the seed of this step and microbatch, the model draws what its stages would draw."""
        (model,) = self.in_order
        if seed is None:
            return self._calling(model, value)
        leaves, skeleton = flatten(value)
        device = device_of(leaves)
        known = self._draws.get(self.training)
        if known is not True and known != (now := [_dropout_of(module) for module in model.modules()]):
            known = self._draws[self.training] = self._has_drawn(leaves, skeleton, device) or now
        layers = self._layers_called(model, skeleton) if known is True else []
        seed_generators(mix(seed, 0), device)
        with _seeding(layers, seed, device):
            return self._calling(model, value)

    def _has_drawn(self, leaves: Sequence[Tensor], skeleton: Any, device: torch.device) -> bool:
        """Runs the forward once and returns whether it draws. Puts back the model's state and gradients.

        A model that draws nothing is never traced. One that draws has filled its own caches before it is traced.
        """
        (model,) = self.in_order
        gradients = ((parameter, "grad", None) for parameter in model.parameters())
        copies = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        with untouched(model), having(gradients), restored(device) as has_drawn:
            self._calling(model, unflatten(copies, skeleton))
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


def _dropout_of(module: nn.Module) -> float:
    """What share of its input a module drops now; of one that is no dropout, whether it is in training mode."""
    return module.p if module.training and isinstance(module, _DropoutNd) else module.training


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
