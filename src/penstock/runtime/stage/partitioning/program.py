"""A traced forward as a list of steps, the part of it that each stage runs, and all such programs of a model.

    step       0 stem   1 relu   2 block.0   3 add(1, 2)   4 block.1   5 cat(4, 1)   6 head
    stages     `------- 0 -----------------------------'   `------ 1 ------------'   ` 2 '
    passed on                                         1, 3                        5

Steps keep the order of the user's forward. A stage begins with a layer. What the forward does between two layers
belongs to the first of them. A value that a later stage uses passes through all stages in between.

`ModelTracer` has one program for each form of the model's inputs and each mode (training, evaluation) that occurs.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from penstock.cost.cut import PartitionError
from penstock.runtime.stage.module_state import untouched
from penstock.runtime.stage.partitioning.source_line import SourceLine, Untraceable
from penstock.runtime.stage.partitioning.tracer import (
    MODEL,
    ForwardTracer,
    attribute_of,
    own_lists,
)
from penstock.runtime.stage.split_backward import unrecorded
from penstock.runtime.stage.stage import with_arguments
from penstock.runtime.tensors.pytree import Skeleton, device_of, flatten, num_leaves, unflatten
from penstock.runtime.tensors.rng import restored


class ValueRef(NamedTuple):
    """In arguments: the value of a step."""

    slot: int


class LayerCall(NamedTuple):
    """The so-manieth call of a layer, by its path in the model."""

    path: str
    occurrence: int


@dataclass(frozen=True)
class TracedStep:
    """One step of a traced forward: a call of a layer, a method or a function.

    Attributes:
        slot: where the value goes. target: a layer's path, a method's name, or a function.
        layer: the call, where it is one. number: of the call among all, from 1; 0 for what is none.
        no_grad: whether it runs without gradients.
    """

    slot: int
    op: str
    target: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    uses: frozenset[int]
    line: SourceLine | None
    layer: LayerCall | None = None
    number: int = 0
    no_grad: bool = False


@dataclass(frozen=True)
class StageProgram:
    """What a stage runs. `frees`: by step, the values that are not needed after it."""

    steps: tuple[TracedStep, ...]
    frees: tuple[tuple[int, ...], ...]
    comes: tuple[int, ...]
    goes: tuple[int, ...]
    tensors: Mapping[int, str]


class TracedProgram:
    """A traced forward as a list of steps, from which stages are cut.

    Attributes:
        steps: in order.
        tensors: slot -> path of a parameter or buffer of the model, or the tensor itself, a constant.
        output: what the forward returns, made of `ValueRef`s. calls: of layers, in order.
    """

    def __init__(self, graph: fx.Graph, entry: nn.Module) -> None:
        own = {id(tensor): name for name, tensor in _tensors(entry).items()}
        slots = {node: slot for slot, node in enumerate(graph.nodes)}
        self.tensors: dict[int, str] = {}
        self.constants: dict[int, Any] = {}
        self.steps: list[TracedStep] = []
        self.output: Any = None
        self.calls: list[LayerCall] = []
        counts: Counter[str] = Counter()

        def reference(value: Any) -> Any:
            return fx.node.map_arg(value, lambda node: ValueRef(slots[node]))

        for node in graph.nodes:
            slot = slots[node]
            if node.op == "output":
                self.output = own_lists(reference(node.args[0]))
                self._output_uses = frozenset(slots[each] for each in node.all_input_nodes)
                continue
            if node.op == "placeholder":
                self.inputs = slot
                continue
            if node.op == "get_attr":
                value = attribute_of(entry, str(node.target))
                if id(value) in own:
                    self.tensors[slot] = own[id(value)]
                else:
                    self.constants[slot] = value
                continue
            args, kwargs = own_lists(reference(node.args)), own_lists(reference(node.kwargs))
            uses = frozenset(slots[each] for each in node.all_input_nodes)
            target: Any = node.target
            layer, number = None, 0
            if node.op == "call_module":
                target = str(node.target).removeprefix(f"{MODEL}.")
                layer = LayerCall(target, counts[target])
                counts[target] += 1
                self.calls.append(layer)
                number = len(self.calls)
            self.steps.append(
                TracedStep(
                    slot, node.op, target, args, kwargs, uses, node.meta.get("line"), layer, number,
                    node.meta.get("no_grad", False),
                )
            )  # fmt: skip

    def parts(self, begins: Sequence[LayerCall]) -> list[StageProgram]:
        """Of each stage its part.

        Args:
            begins: the call with which each stage but the first begins.

        Raises:
            PartitionError: the forward does not make such a call.
        """
        places = {step.layer: place for place, step in enumerate(self.steps) if step.layer is not None}
        for call in begins:
            if call not in places:
                raise PartitionError(
                    f"a stage begins with layer {call.path}, which the forward does not call with these inputs or in "
                    "this mode; give ps.split(..., example=) inputs like those of the run"
                )
        starts = [0, *(places[call] for call in begins), len(self.steps)]
        last = len(starts) - 2
        if sorted(starts) != starts:
            raise PartitionError(
                f"with these inputs or in this mode the forward calls {', '.join(c.path for c in begins)} in another "
                "order; give ps.split(..., example=) inputs like those of the run"
            )
        stages = [tuple(self.steps[a:b]) for a, b in pairwise(starts)]
        made_at = {self.inputs: 0}
        last_stage: dict[int, int] = {}
        for stage, steps in enumerate(stages):
            made_at |= {step.slot: stage for step in steps}
            last_stage |= {slot: stage for step in steps for slot in step.uses}
        last_stage |= dict.fromkeys(self._output_uses, last)
        given = {**self.tensors, **self.constants}
        found = []
        for stage, steps in enumerate(stages):
            comes = sorted(s for s, at in made_at.items() if at < stage <= last_stage.get(s, 0) and s not in given)
            goes = sorted(s for s, at in made_at.items() if at <= stage < last_stage.get(s, 0) and s not in given)
            returned = self._output_uses if stage == last else frozenset[int]()
            used = {slot for step in steps for slot in step.uses} | returned
            kept = {*goes, *returned}
            last_use: dict[int, int] = {}
            for place, step in enumerate(steps):
                for slot in (*step.uses, step.slot):
                    last_use[slot] = place
            frees: list[list[int]] = [[] for _ in steps]
            for slot, place in last_use.items():
                if slot not in kept and slot not in given:
                    frees[place].append(slot)
            tensors = {slot: self.tensors[slot] for slot in sorted(used) if slot in self.tensors}
            found.append(StageProgram(steps, tuple(map(tuple, frees)), tuple(comes), tuple(goes), tensors))
        return found


def fill(template: Any, values: Mapping[int, Any]) -> Any:
    """A template with values in the places of its references."""
    kind = type(template)
    if kind is ValueRef:
        return values[template.slot]
    if kind is tuple:
        return tuple([fill(each, values) for each in template])
    if kind is list:
        return [fill(each, values) for each in template]
    if kind is dict:
        return {key: fill(each, values) for key, each in template.items()}
    if kind is slice:
        return slice(fill(template.start, values), fill(template.stop, values), fill(template.step, values))
    return template


def _tensors(entry: nn.Module) -> dict[str, Any]:
    model = entry.get_submodule(MODEL)
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


class ModelTracer:
    """Traces a model once for each form of its inputs and each mode.

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
        self._programs: dict[_Form, TracedProgram] = {}
        self._parts: dict[_Form, list[StageProgram]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelTracer:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": {}, "_parts": {}}  # functions among their steps may have no name

    def first(self) -> TracedProgram:
        """The program in training; modules whose forward cannot be traced are layers from then on.

        Raises:
            Untraceable: something stands in the way of the model's own forward.
        """
        if self._leaves is not None:  # caches that the forward fills hold tensors then; the trace says what fails
            with suppress(Exception), untouched(self.model), restored(device_of(self._leaves)), torch.no_grad():
                self.outputs()
        while True:
            try:
                return self.program(self.skeleton, True, (True,) * len(self.opened))
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
        modes = tuple(training and module.training for module in self.opened)
        key = str(skeleton), training, modes
        if key not in self._parts:
            program = self.program(skeleton, training, modes)
            self._parts[key] = program.parts(self.begins)
        return self._programs[key], self._parts[key][stage]

    def program(self, skeleton: Skeleton, training: bool, modes: tuple[bool, ...]) -> TracedProgram:
        """The program of the whole forward for inputs of this form.

        Args:
            modes: of opened modules, whether they are in training mode.
        """
        key = str(skeleton), training, modes
        if key not in self._programs:
            # What the forward is run on is nothing to be split.
            self._programs[key] = unrecorded(self._traced, skeleton, training, modes)
        return self._programs[key]

    def _traced(self, skeleton: Skeleton, training: bool, modes: tuple[bool, ...]) -> TracedProgram:
        _require_fits(self.model, skeleton)
        like_example = self._leaves is not None and skeleton == self.skeleton
        example = self._leaves if like_example else None
        before = [(module, module.training) for module in self.model.modules()]
        try:
            for module, _ in () if training else before:
                module.training = False
            for module, mode in zip(self.opened, modes, strict=True):
                module.training = mode
            return self._recorded(skeleton, example)
        finally:
            for module, mode in before:
                module.training = mode

    def _recorded(self, skeleton: Skeleton, example: list[Tensor] | None) -> TracedProgram:
        tracer = ForwardTracer(self.opened, example)
        try:
            with untouched(self.model), restored(device_of(self._leaves or [])):
                graph, entry = tracer.record(self.model, skeleton, num_leaves(skeleton))
        except Untraceable as error:
            error.__dict__["module"] = tracer.failed_in
            raise
        return TracedProgram(graph, entry)

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


_Form = tuple[str, bool, tuple[bool, ...]]
"""Of inputs, whether in training, and the modes of opened modules."""


def _require_fits(model: nn.Module, skeleton: Skeleton) -> None:
    """Raises PartitionError where the model's forward does not take inputs of this form."""
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # of what is not written in Python
        return
    kind, inside = ("tensor", ()) if isinstance(skeleton, int) else skeleton
    kind = kind.partition(" ")[0]  # of a named tuple
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


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.detach(), b.detach())


def closed_paths(tracing: ModelTracer) -> list[str]:
    """In words, which modules are kept whole, and why. Those with the same reason, as equal blocks, share a line."""
    paths = {module: path for path, module in tracing.model.named_modules()}
    by_reason: dict[str, list[str]] = {}
    for module, error in tracing.closed.items():
        by_reason.setdefault(str(error), []).append(paths[module])
    return [f"{_listed(found)} kept whole: {reason}" for reason, found in by_reason.items()]


def _listed(paths: list[str]) -> str:
    if len(paths) == 1:
        return f"{paths[0]} is"
    if len(paths) < 5:
        return f"{', '.join(paths[:-1])} and {paths[-1]} are"
    return f"{paths[0]} to {paths[-1]} ({len(paths)} modules) are"
