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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from penstock.cost.cut import PartitionError
from penstock.runtime.partitioning.tracer import MODEL, ForwardTracer, Untraceable, attribute_of
from penstock.runtime.split_backward import unrecorded
from penstock.runtime.stage.module_state import untouched
from penstock.runtime.stage.stage import with_arguments
from penstock.runtime.tensors.pytree import Skeleton, device_of, flatten, num_leaves, parts_of, unflatten
from penstock.runtime.tensors.rng import restored

MOST_PROGRAMS = 64
"""Programs of a model that are kept. Each value of a number among its inputs has programs of its own."""


class LayerCall(NamedTuple):
    """A call of a layer: the layer's path in the model, and how many calls of it come before."""

    path: str
    occurrence: int


class StageProgram(NamedTuple):
    """The steps that a stage runs.

    Attributes:
        frees: for each step, the values that no later step needs. comes, goes: the values that pass in and out.
        tensors: for each value that is a parameter or buffer of the model, its path.
    """

    steps: Sequence[fx.Node]
    frees: Sequence[Collection[fx.Node]]
    comes: Sequence[fx.Node]
    goes: Sequence[fx.Node]
    tensors: Mapping[fx.Node, str]


class TracedProgram:
    """A traced forward as a list of steps, from which stages are cut. A node of its graph stands for a step's value.

    The `meta` of a step has the `line` of the user's code, whether it runs with `no_grad`, and, if it calls a layer,
    the call (`layer`, else None) and its `number` among all calls, from 1.

    Attributes:
        steps, calls: all steps and all calls of layers, in order.
        tensors: for each value that is a parameter or buffer of the model, its path.
        constants: other values that are there before the first step.
        inputs: the value that is the list of the model's inputs.
        output: what the forward returns, with nodes in the places of values.
        stages: the part of each stage; empty until `ModelTracer.part` is asked for one.
    """

    def __init__(self, graph: fx.Graph, entry: nn.Module) -> None:
        model = entry.get_submodule(MODEL)
        paths = {id(tensor): path for path, tensor in (*model.named_buffers(), *model.named_parameters())}
        self.tensors: dict[fx.Node, str] = {}
        self.constants: dict[fx.Node, Any] = {}
        self.steps: list[fx.Node] = []
        self.calls: list[LayerCall] = []
        self.stages: list[StageProgram] = []
        counts: Counter[str] = Counter()
        for node in graph.nodes:
            if node.op == "output":
                self.output, self._returned = node.args[0], node.all_input_nodes
            elif node.op == "placeholder":
                self.inputs = node
            elif node.op == "get_attr":
                value = attribute_of(entry, str(node.target))
                if id(value) in paths:
                    self.tensors[node] = paths[id(value)]
                else:
                    self.constants[node] = value
            else:
                node.meta["layer"] = None
                if node.op == "call_module":
                    path = str(node.target).removeprefix(f"{MODEL}.")
                    self.calls.append(LayerCall(path, counts[path]))
                    counts[path] += 1
                    node.meta.update(layer=self.calls[-1], number=len(self.calls))
                self.steps.append(node)

    def parts(self, begins: Sequence[LayerCall]) -> list[StageProgram]:
        """Returns the part of each stage.

        Args:
            begins: the call with which each stage but the first begins.

        Raises:
            PartitionError: the forward does not make these calls, in this order.
        """
        places = {step.meta["layer"]: place for place, step in enumerate(self.steps)}
        starts = [0, *(places.get(call, -1) for call in begins), len(self.steps)]
        if sorted(starts) != starts:
            raise PartitionError(
                f"stages begin with layers {', '.join(call.path for call in begins)}, and the forward does not call "
                "these in this order with these inputs or in this mode; give ps.split(..., example=) inputs like "
                "those of the run"
            )
        stages = [self.steps[a:b] for a, b in pairwise(starts)]
        made_at = {self.inputs: 0}
        last_use: dict[fx.Node, int] = {}
        for stage, steps in enumerate(stages):
            made_at |= dict.fromkeys(steps, stage)
            last_use |= {value: stage for step in steps for value in step.all_input_nodes}
        last_use |= dict.fromkeys(self._returned, len(stages) - 1)
        travels = [value for value in made_at if made_at[value] < last_use.get(value, 0)]
        found = []
        for stage, steps in enumerate(stages):
            comes = [value for value in travels if made_at[value] < stage <= last_use[value]]
            goes = [value for value in travels if made_at[value] <= stage < last_use[value]]
            returned = self._returned if stage == len(begins) else []
            used = {*returned, *(value for step in steps for value in step.all_input_nodes)}
            frees = _frees(steps, {*goes, *returned, *self.tensors, *self.constants})
            tensors = {value: path for value, path in self.tensors.items() if value in used}
            found.append(StageProgram(steps, frees, comes, goes, tensors))
        return found


def _frees(steps: Sequence[fx.Node], kept: set[fx.Node]) -> list[set[fx.Node]]:
    """Returns for each step the values that no later step needs, without those that are kept."""
    needed, frees = set(kept), []
    for step in reversed(steps):
        frees.append({*step.all_input_nodes, step} - needed)
        needed |= frees[-1]
    return frees[::-1]


_Form = tuple[str, bool, tuple[bool, ...]]
"""The form of inputs, whether the model is in training mode, and for each opened module whether it is."""


class ModelTracer:
    """Traces a model once for each form of its inputs and each mode.

    Args:
        opened: the modules whose forwards are traced. If one can't be traced, it is taken out, and `closed` says why.
        example: the inputs of one microbatch. None: one tensor for each argument without a default.

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

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelTracer:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": {}}  # functions among their steps may have no name

    def first(self) -> TracedProgram:
        """Returns the program in training. Modules whose forward cannot be traced are layers from then on.

        Raises:
            Untraceable: something stands in the way of the model's own forward.
        """
        if self._leaves is not None:  # caches that the forward fills then hold tensors; the trace says what fails
            with suppress(Exception), untouched(self.model), restored(device_of(self._leaves)), torch.no_grad():
                self.outputs()
        while True:
            try:
                return self.program(self.skeleton, True, (True,) * len(self.opened))
            except Untraceable as error:
                if error.module in (None, self.model) or error.module not in self.opened:
                    raise
                self.closed[error.module] = error
                inside = set(error.module.modules())
                self.opened = [module for module in self.opened if module not in inside]

    def part(self, stage: int, skeleton: Skeleton, training: bool) -> tuple[TracedProgram, StageProgram]:
        """Returns the whole program, and the part of it that a stage runs.

        Args:
            training: False: in evaluation mode, whatever the model's own mode.
        """
        program = self.program(skeleton, training, tuple(training and module.training for module in self.opened))
        program.stages = program.stages or program.parts(self.begins)
        return program, program.stages[stage]

    def program(self, skeleton: Skeleton, training: bool, modes: tuple[bool, ...]) -> TracedProgram:
        """Returns the program of the whole forward for inputs of this form.

        Args:
            modes: for each opened module, whether it is in training mode.

        Raises:
            PartitionError: a line of the forward stands in the way, or the inputs hold a BlockMask.
        """
        key = str(skeleton), training, modes
        if key not in self._programs:
            if "mask" in parts_of(skeleton):
                raise PartitionError(
                    f"{type(self.model).__name__} takes a BlockMask, whose mask_mod a trace would freeze; give "
                    "ps.Pipeline a list with one module for each stage, the first of which takes the mask"
                )
            for oldest in list(self._programs)[: 1 - MOST_PROGRAMS]:
                del self._programs[oldest]
            # While the forward is traced, its layers run on the example. No backward of theirs is split.
            self._programs[key] = unrecorded(self._traced_by_example, skeleton, training, modes)
        return self._programs[key]

    def _traced_by_example(self, skeleton: Skeleton, training: bool, modes: tuple[bool, ...]) -> TracedProgram:
        """Traces inputs of the example's form with its tensors, and others without.

        Inputs that differ from the example in constants alone, such as a temperature, may need its tensors too. But a
        number may be a size, which these tensors do not have, so they are the second try.
        """
        is_same = skeleton == self.skeleton
        try:
            return self._traced(self._leaves if is_same else None, skeleton, training, modes)
        except Untraceable:
            if is_same or self._leaves is None or list(parts_of(skeleton)) != list(parts_of(self.skeleton)):
                raise
            return self._traced(self._leaves, skeleton, training, modes)

    def _traced(self, example: Any, skeleton: Skeleton, training: bool, modes: tuple[bool, ...]) -> TracedProgram:
        tracer = ForwardTracer(self.opened, example)
        before = [(module, module.training) for module in self.model.modules()]
        try:
            for module, mode in before:
                module.training = training and mode
            for module, mode in zip(self.opened, modes, strict=True):
                module.training = mode
            with untouched(self.model), restored(device_of(self._leaves or [])):
                return TracedProgram(*tracer.record(self.model, skeleton, num_leaves(skeleton)))
        except Untraceable as error:
            error.module = tracer.failed_in
            raise
        finally:
            for module, mode in before:
                module.training = mode

    def outputs(self) -> Any:
        """Returns the model's own output for the example."""
        assert self._leaves is not None
        return with_arguments(self.model, unflatten(list(self._leaves), self.skeleton))

    def closed_paths(self) -> list[str]:
        """Says which modules are kept whole, and why. Modules with the same reason, as equal blocks, share a line."""
        paths = {module: path for path, module in self.model.named_modules()}
        by_reason: dict[str, list[str]] = {}
        for module, error in self.closed.items():
            by_reason.setdefault(str(error), []).append(paths[module])
        return [f"kept whole: {', '.join(found)}: {reason}" for reason, found in by_reason.items()]


def _form_of(model: nn.Module) -> Skeleton:
    """Returns the form of one tensor for each argument of the forward without a default.

    Raises:
        Untraceable: there is no such argument, or one has no place.
    """
    known = inspect.signature(model.forward).parameters.values()
    needed = [each.kind for each in known if each.default is each.empty and each.kind not in _ANY_NUMBER]
    if not needed or inspect.Parameter.KEYWORD_ONLY in needed:
        raise Untraceable(
            f"the forward of {type(model).__name__} does not say how many tensors it takes",
            None,
            "Give an example of one microbatch's inputs, ps.split(model, ..., example=inputs)",
        )
    return 0 if len(needed) == 1 else ["tuple", list(range(len(needed)))]


_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
