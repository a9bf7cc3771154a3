"""The programs of a model: one for each form of its inputs and each mode (training, evaluation) that occurs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import torch
from torch import Tensor, nn

from penstock.cost.cut import PartitionError
from penstock.runtime.stage.partitioning.layers import why_closed
from penstock.runtime.stage.partitioning.place import Untraceable
from penstock.runtime.stage.partitioning.program import LayerCall, StageProgram, TracedProgram
from penstock.runtime.stage.partitioning.recorder import Recorder
from penstock.runtime.stage.stage import with_arguments
from penstock.runtime.tensors.pytree import Skeleton, flatten, unflatten
from penstock.runtime.tensors.rng import restored

_SIMPLE = (int, float, str, tuple)


class ModelTracer:
    """Traces a model, and again where its inputs have another form or the forward's constants have changed.

    Args:
        opened: the modules whose forwards are traced; those that cannot be are taken out, and `closed` says why.
        example: of the inputs of one microbatch; None: one tensor for each argument without a default.

    Attributes:
        skeleton: the form of the inputs that stages need not tell one another.
        closed: by module, what stands in the way of opening it.
        begins: the calls with which stages but the first begin.
    """

    def __init__(self, model: nn.Module, opened: Sequence[nn.Module], example: Any = None) -> None:
        self.model, self.opened, self.example = model, list(opened), example
        self.closed: dict[nn.Module, Untraceable] = {}
        self.begins: tuple[LayerCall, ...] = ()
        self._leaves: list[Tensor] | None = None
        if example is not None:
            self._leaves, self.skeleton = flatten(example)
        else:
            self.skeleton = _form_of(model)
        self._programs: dict[tuple[str, tuple[bool, ...]], TracedProgram] = {}
        self._parts: dict[tuple[str, tuple[bool, ...]], list[StageProgram]] = {}
        self._state: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelTracer:
        return self

    def first(self) -> TracedProgram:
        """The program in training; modules whose forward cannot be traced are layers from then on.

        Raises:
            Untraceable: something stands in the way of the model's own forward.
        """
        while True:
            try:
                return self.program(self.skeleton, (True,) * len(self.opened))
            except Untraceable as error:
                failed = error.__dict__.get("module")
                if failed is None or failed is self.model or failed not in self.opened:
                    raise
                self.closed[failed] = error
                inside = set(failed.modules())
                self.opened = [module for module in self.opened if module not in inside]

    def part(self, stage: int, skeleton: Skeleton, training: bool) -> tuple[TracedProgram, StageProgram]:
        """What a stage runs.

        Args:
            training: False: in evaluation mode, whatever the model's own mode.
        """
        self._require_same()
        modes = tuple(training and module.training for module in self.opened)
        key = str(skeleton), modes
        if key not in self._parts:
            program = self.program(skeleton, modes)
            self._parts[key] = program.parts(self.begins)
        return self._programs[key], self._parts[key][stage]

    def program(self, skeleton: Skeleton, modes: tuple[bool, ...]) -> TracedProgram:
        key = str(skeleton), modes
        if key not in self._programs:
            self._programs[key] = Context().run(self._traced, skeleton, modes)
        return self._programs[key]

    def _traced(self, skeleton: Skeleton, modes: tuple[bool, ...]) -> TracedProgram:
        _require_fits(self.model, skeleton)
        like_example = self._leaves is not None and skeleton == self.skeleton
        recorder = Recorder(self.opened, self._leaves if like_example else None)
        before = [module.training for module in self.opened]
        device = self._leaves[0].device if self._leaves else torch.device("cpu")
        try:
            for module, mode in zip(self.opened, modes, strict=True):
                module.training = mode
            with untouched(self.model), restored(device):
                graph, entry = recorder.record(self.model, skeleton, num_leaves(skeleton))
        except Untraceable as error:
            error.__dict__["module"] = recorder.failed_in
            raise
        finally:
            for module, mode in zip(self.opened, before, strict=True):
                module.training = mode
        self._state = [(vars(module), _constants(module)) for module in self.opened]
        return TracedProgram(graph, entry, recorder.kinds)

    def _require_same(self) -> None:
        """Lets go of the programs where an attribute of an opened module is not what it was.

        Raises:
            Untraceable: it has got a hook.
        """
        for now, before in self._state:
            for name, value in before.items():
                if now.get(name) is not value and not (isinstance(value, _SIMPLE) and now.get(name) == value):
                    self._programs.clear()
                    self._parts.clear()
                    self._state = []
                    return
        for module in self.opened:
            if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
                raise Untraceable(f"the {type(module).__name__} {why_closed(module)} since it was cut", None)

    def compare(self, value: Any, output: Any) -> None:
        """Raises Untraceable where the stages give something else than the model."""
        leaves, skeleton = flatten(output)
        own, form = flatten(value)
        if str(skeleton) != str(form) or not all(map(_equal, own, leaves)):
            raise Untraceable("the stages, run on the example, give something else than the model", None)

    def outputs(self) -> Any:
        """The model's own output for the example."""
        assert self._leaves is not None
        return with_arguments(self.model, unflatten(list(self._leaves), self.skeleton))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers that change inside are set back."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    places = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    try:
        yield
    finally:
        for module, buffers in places:
            module._buffers.update(buffers)
        for buffer, value in before:
            buffer.data.copy_(value)  # which counts as no change in place


def num_leaves(skeleton: Skeleton) -> int:
    """How many tensors a value of this form has."""
    if isinstance(skeleton, int):
        return skeleton + 1
    kind, inside = skeleton
    if kind == "const":
        return 0
    return max((num_leaves(each[1] if kind == "dict" else each) for each in inside), default=0)


def _require_fits(model: nn.Module, skeleton: Skeleton) -> None:
    """Raises PartitionError where the model's forward does not take inputs of this form."""
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # of what is not written in Python
        return
    kind, inside = ("tensor", ()) if isinstance(skeleton, int) else skeleton
    named = [name for name, _ in inside] if kind == "dict" else []
    places = {"tuple": len(inside), "dict": 0}.get(kind, 1)
    try:
        signature.bind(*range(places), **dict.fromkeys(named))
    except TypeError as error:
        given = {"tuple": f"a tuple of {places}", "dict": f"a dict of {', '.join(named)}"}.get(kind, "one tensor")
        takes = [name + "=..." * (each.default is not each.empty) for name, each in signature.parameters.items()]
        raise PartitionError(
            f"the inputs are {given}, and {type(model).__name__}.forward takes {', '.join(takes)}: {error}; give a "
            "tensor, a tuple of positional arguments or a dict of keyword arguments"
        ) from None


def _form_of(model: nn.Module) -> Skeleton:
    """A tensor for each argument of the forward without a default.

    Raises:
        Untraceable: there is none.
    """
    known = inspect.signature(model.forward).parameters.values()
    needed = [each for each in known if each.default is each.empty and each.kind in _BY_PLACE]
    named = [each for each in known if each.default is each.empty and each.kind is inspect.Parameter.KEYWORD_ONLY]
    if not needed or named:
        raise Untraceable(
            f"the forward of {type(model).__name__} does not say how many tensors it takes",
            None,
            "Give an example of one microbatch's inputs, ps.split(model, ..., example=inputs)",
        )
    return 0 if len(needed) == 1 else ["tuple", list(range(len(needed)))]


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _constants(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that tracing takes as they are."""
    return {name: value for name, value in vars(module).items() if name != "training"}


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.detach(), b.detach())


def closed_paths(tracing: ModelTracer) -> list[str]:
    """In words, which modules are kept whole, and why."""
    paths = {module: path for path, module in tracing.model.named_modules()}
    return [f"{paths[module]} is kept whole: {error}" for module, error in tracing.closed.items()]
