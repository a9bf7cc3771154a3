"""Cuts a model, or a list with one module per stage, into stages (`stages_of`).

`ps.split` (`Split`) cuts any module's forward, and shows its stages as a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from penstock.cost.cut import PartitionError, partition
from penstock.runtime.errors import BrokenContract, RuntimeFailure
from penstock.runtime.partitioning.layers import opened_modules, why_closed
from penstock.runtime.partitioning.program import ModelTracer, TracedProgram
from penstock.runtime.partitioning.traced_stage import TracedStage, WholeModel
from penstock.runtime.partitioning.tracer import KeptValue, Untraceable
from penstock.runtime.stage.module_state import untouched
from penstock.runtime.stage.stage import WHOLE, Stage, StageSource, require_stage, with_arguments, with_one_argument
from penstock.runtime.tensors.pytree import device_of, flatten
from penstock.runtime.tensors.rng import restored
from penstock.unknown_names import refuse_unknown


class Split(list[Stage]):
    """A model cut into stages: a list of stages for `ps.Pipeline`. `print` shows it as a table.

    Attributes:
        model: the whole model. tracing: how its forward was traced.
        layers: for each stage, the paths of the layers that it calls, in order.
        costs: for each layer called, in order, its floating-point operations for the example, or its parameters.
        shares: each stage's share of all costs. They sum to 1.
        sent: for each stage, the bytes that it passes on for the example, 0 for the last. None without an example.
        kept_whole: modules that hold layers but could not be opened, and why.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> cut = ps.split(model, 2, example=torch.randn(4, 8))
        >>> len(cut), cut.layers, sum(cut.shares), cut.sent
        (2, [['0', '1'], ['2', '3']], 1.0, [128, 0])
    """

    def __init__(
        self, tracing: ModelTracer, program: TracedProgram, ends: Sequence[int], costs: Sequence[float]
    ) -> None:
        calls = program.calls
        self.model, self.tracing, self.costs = tracing.model, tracing, list(costs)
        self.kept_whole = tracing.closed_paths()
        self.shares = [sum(costs[a:b]) / (sum(costs) or 1.0) for a, b in pairwise(ends)]
        self.layers = [[call.path for call in calls[a:b]] for a, b in pairwise(ends)]
        tracing.begins = tuple(calls[start] for start in ends[1:-1])
        super().__init__(_stages(tracing, program))
        self.sent = None if tracing.example is None else _compared(tracing, self)

    @property
    def batch_rules(self) -> Any:
        """The model's own rules for its batches; None if it has none. See `ps.BatchRules`."""
        return getattr(self.model, "batch_rules", None)

    @property
    def num_parameters(self) -> list[int]:
        """Number of parameters of each stage. A shared parameter counts in each stage that has it."""
        return [sum(p.numel() for p in stage.parameters()) for stage in self]

    def __str__(self) -> str:
        sent = ["" if self.sent is None else _bytes(each) for each in self.sent or [0] * len(self)]
        rows = [("stage", "layers", "parameters", "cost", "passes on" if self.sent is not None else "")]
        for stage, (paths, held) in enumerate(zip(self.layers, self.num_parameters, strict=True)):
            name = paths[0] if len(paths) == 1 else f"{paths[0]} .. {paths[-1]}"
            share = f"{self.shares[stage]:.1%}"
            rows.append((str(stage), f"{name} ({len(paths)})", f"{held:,}", share, sent[stage]))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                f"{cell:{side}{width}}" for cell, side, width in zip(row, "<<>>>", widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *self.kept_whole])

    def __repr__(self) -> str:
        return f"<Split into {len(self)} stages of {', '.join(str(len(paths)) for paths in self.layers)} layers>"


@refuse_unknown(PartitionError)
def split(
    model: nn.Module,
    num_stages: int | None = None,
    *,
    at: Iterable[str] = (),
    sizes: Iterable[int] = (),
    example: Any = None,
    costs: Iterable[float] | None = None,
) -> Split:
    """Cuts a model into stages, between its layers and whatever its forward does between them.

        cut = ps.split(model, 4)                               # by cost
        cut = ps.split(model, at=["encoder.3", "decoder.0"])   # before these layers
        pipe = ps.Pipeline(cut, ps.build("1f1b", 4, 8), ...)

    The forward is traced with `torch.fx`; the layers are called as they are. Loss, gradients and buffers equal the
    model's, to the bit. Parameters are the model's own and keep their names. If tracing would change the result of
    some line of the forward, an error names that line.

    Args:
        model: any module. Its blocks are the entries of a `ModuleList`, `ModuleDict` or `Sequential`.
        num_stages: number of stages. Without it and without `at`, each layer that is called gets a stage, which shows
            where the model can be cut.
        at: for each stage but the first, the path of its first layer. A path inside a block opens the block.
        sizes: number of layers of each stage, instead of `at`.
        example: inputs of one microbatch, as for `pipe.step`: a tensor, a tuple or a dict. With an example the
            forward may depend on shapes, layers are weighed by their operations, and the stages are compared with the
            model.
        costs: cost of each layer that is called, in order and in any unit, instead of its operations.

    Returns:
        The stages, as a sequence for `ps.Pipeline`. Printed, it is a table.

    Raises:
        PartitionError: a line of the forward that can't be cut (the error names it), or fewer layers than stages.

    Examples:
        >>> import torch, penstock as ps
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> cut = ps.split(model, 2, example=torch.ones(1, 8))
        >>> len(cut), [len(list(stage.parameters())) for stage in cut]
        (2, [4, 4])
    """
    if isinstance(at, str):
        raise PartitionError(f"at is the text {at!r}; give a list of paths, at=[{at!r}]")
    at, sizes, weights = list(at), list(sizes), None if costs is None else list(costs)
    require_stage(model, "the model")
    try:
        tracing = ModelTracer(model, opened_modules(model, [_known(model, name) for name in at]), example)
        program = tracing.first()
        paths = [call.path for call in program.calls]
        if weights is None:
            layers = [model.get_submodule(path) for path in paths]
            weights = parameter_costs(layers) if example is None else _operations(tracing, paths)
        if len(weights) != len(paths):
            raise PartitionError(f"{len(weights)} costs given for {len(paths)} layers: {', '.join(paths)}")
        return Split(tracing, program, _ends(tracing, paths, num_stages, at, sizes, weights), weights)
    except Untraceable as error:
        raise PartitionError(_cannot(model, error)) from error
    except BrokenContract as error:
        raise PartitionError(f"{type(model).__name__} cannot be cut there: {error}") from error


def _ends(
    tracing: ModelTracer,
    paths: Sequence[str],
    num_stages: int | None,
    at: Sequence[str],
    sizes: Sequence[int],
    costs: Sequence[float],
) -> list[int]:
    """Returns how many layers come before each stage, and the number of all layers.

    Args:
        paths: of the layers, in the order in which the forward calls them. The other arguments are those of `split`.
    """
    if at:
        ends = [0, *(_place(paths, name, tracing) for name in at), len(paths)]
        if any(a >= b for a, b in pairwise(ends)):
            raise PartitionError(
                f"stages cannot begin at {', '.join(at)}: the forward calls its layers in the order "
                f"{', '.join(paths)}"
            )
        if num_stages is not None and num_stages != len(at) + 1:
            raise PartitionError(f"{len(at)} names in at= make {len(at) + 1} stages, not {num_stages}")
        return ends
    if sizes:
        if min(sizes) < 1 or sum(sizes) != len(paths) or len(sizes) != (num_stages or len(sizes)):
            raise PartitionError(
                f"sizes {', '.join(map(str, sizes))} are for {len(sizes)} stages and {sum(sizes)} layers; give each "
                f"of the {num_stages or len(sizes)} stages at least one of the {len(paths)} layers"
            )
        return [0, *accumulate(sizes)]
    wanted = len(paths) if num_stages is None else num_stages
    if wanted > len(paths):
        raise PartitionError(
            f"{wanted} stages asked of a {type(tracing.model).__name__} with {len(paths)} layers to cut between: "
            f"{', '.join(paths) or 'none'}{_why_whole(tracing)}; name layers inside of these with "
            "ps.split(model, at=[...]), or use fewer stages"
        )
    return [0, *(part.stop for part in partition(costs, wanted))]


def _why_whole(tracing: ModelTracer) -> str:
    return "".join(f"; {each}" for each in tracing.closed_paths())


def _cannot(model: nn.Module, error: Untraceable) -> str:
    of_transformers = any(each.__module__.partition(".")[0] == "transformers" for each in type(model).__mro__)
    instead = (
        "Models of transformers are cut by penstock.models.huggingface.Decoder(model), whose .stages(num_stages) "
        "ps.Pipeline takes, with its .loss, .tied and .inputs_and_targets(batch)"
    )
    name = type(model).__name__
    return f"{name} cannot be cut as it is: {error}. {instead if of_transformers else error.instead}"


def _known(model: nn.Module, name: str) -> str:
    """Returns the name. Raises PartitionError if the model has no such module."""
    try:
        model.get_submodule(name)
    except AttributeError:
        names = [path for path, _ in model.named_modules() if path]
        close = [path for path in names if path.endswith(name.split(".")[-1])] or names
        raise PartitionError(
            f"at= names {name!r}, which the model does not have; it has {', '.join(close[:8])}"
        ) from None
    return name


def _place(paths: Sequence[str], name: str, tracing: ModelTracer) -> int:
    for place, path in enumerate(paths):
        if f"{path}.".startswith(f"{name}."):
            return place
    raise PartitionError(
        f"at= names {name!r}, which the forward does not call by itself; it calls {', '.join(paths)}"
        f"{_why_whole(tracing)}"
    )


def parameter_costs(layers: Sequence[nn.Module]) -> list[float]:
    """Returns each layer's cost if nothing was measured: its number of parameters, and 1 for being there."""
    return [1.0 + sum(p.numel() for p in layer.parameters()) for layer in layers]


def _operations(tracing: ModelTracer, paths: Sequence[str]) -> list[float]:
    """Returns for each call of a layer its floating-point operations for the example, at least 1.

    oneDNN, cuDNN and torch's fast path compute recurrent and attention layers in one piece, which counts as nothing.
    Without them torch computes these layers by matmuls.
    """
    counter, is_fast = FlopCounterMode(display=False), torch.backends.mha.get_fastpath_enabled()
    one_dnn, *_ = torch.backends.mkldnn.set_flags(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            untouched(tracing.model), restored(device_of(tracing.example)), torch.no_grad(), counter,
            torch.backends.cudnn.flags(enabled=False),
        ):  # fmt: skip
            tracing.outputs()
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        torch.backends.mkldnn.set_flags(one_dnn)
    counts = {path: sum(found.values()) for path, found in counter.get_flop_counts().items()}
    name, num_calls = type(tracing.model).__name__, Counter(paths)
    return [max(1.0, counts.get(f"{name}.{path}", 0) / num_calls[path]) for path in paths]


def _stages(tracing: ModelTracer, program: TracedProgram) -> list[Stage]:
    """Makes a stage of each part, with the layers and tensors that it uses in training or evaluation.

    The last stage also holds the tensors that no stage uses, so that nothing of the model is lost.
    """
    model = tracing.model
    programs = [program]
    try:
        programs.append(tracing.program(tracing.skeleton, False, (False,) * len(tracing.opened)))
        parts = [each.parts(tracing.begins) for each in programs]
    except KeptValue:
        raise
    except PartitionError:  # an evaluation then says it
        parts = [program.parts(tracing.begins)]
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    stages: list[Stage] = []
    taken: set[str] = set()
    for index in range(len(tracing.begins) + 1):
        found = [each[index] for each in parts]
        paths = dict.fromkeys(step.meta["layer"].path for part in found for step in part.steps if step.meta["layer"])
        layers = {path: model.get_submodule(path) for path in paths}
        used = dict.fromkeys(path for part in found for path in part.tensors.values())
        if index == len(tracing.begins):
            own = {id(t) for stage in stages for t in (*stage.parameters(), *stage.buffers())}
            own |= {id(t) for layer in layers.values() for t in (*layer.parameters(), *layer.buffers())}
            used.update(dict.fromkeys(path for path, tensor in tensors.items() if id(tensor) not in own))
        alias = {
            path: f"{path}@{index}" for path in layers if any(name in taken for name in _names_in(path, layers[path]))
        } | {path: _renamed(path, index) for path in used if path in taken}
        stage = TracedStage(tracing, index, layers, {path: tensors[path] for path in used}, alias)
        taken |= {name for name, _ in (*stage.named_parameters(), *stage.named_buffers())}
        taken |= {name for path, layer in layers.items() for name in _names_in(path, layer)} | set(used)
        stages.append(stage)
    return stages


def _names_in(path: str, layer: nn.Module) -> list[str]:
    return [f"{path}.{name}" for name, _ in (*layer.named_parameters(), *layer.named_buffers())]


def _renamed(path: str, index: int) -> str:
    folder, _, last = path.rpartition(".")
    return f"{folder}@{index}.{last}" if folder else f"{last}@{index}"


def _compared(tracing: ModelTracer, stages: Sequence[Stage]) -> list[int]:
    """Returns the bytes that each stage passes on for the example.

    Raises:
        Untraceable: the stages give something else than the model.
    """

    def run(function: Callable[[], Any]) -> Any:
        with untouched(tracing.model), restored(device_of(tracing.example)), torch.no_grad():
            torch.manual_seed(0)
            return function()

    def staged() -> list[Any]:
        values = [tracing.example]
        for stage in stages:
            values.append(stage(values[-1]))
        return values[1:]

    expected, form = flatten(run(tracing.outputs))
    passed_on = [flatten(value) for value in run(staged)]
    found, found_form = passed_on.pop()
    alike = (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, expected))
    if str(found_form) != str(form) or not all(alike):
        raise Untraceable("the stages, run on the example, give something else than the model", None)
    return [sum(leaf.numel() * leaf.element_size() for leaf in leaves) for leaves, _ in passed_on] + [0]


def _bytes(num: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num >= size:
            return f"{num / size:.1f} {unit}"
    return f"{num} B" if num else ""


def stages_of(
    model: nn.Module | Sequence[StageSource], num_stages: int, costs: Sequence[float] | None = None
) -> list[Stage | StageSource]:
    """Returns the stages of `model`, in order. Functions that make one are called later, by `build_stage`.

    Args:
        model: a module, cut by cost, or a list with one module, or function that makes one, for each stage. One that
            is no `nn.Sequential`, or does more than run its layers, is traced.
        costs: of each layer; by default its number of parameters.

    Raises:
        PartitionError: more stages than layers, a list of another length than the schedule's stages, or something
            in the model's forward that stands in the way of tracing it.
        RuntimeFailure: a module that cannot be a stage, see `require_stage`.
    """
    if isinstance(model, nn.Module):
        require_stage(model, "the model")
        calling = with_arguments
        if isinstance(model, nn.Sequential) and (num_stages > 1 or len(model) > 0):
            if costs is not None and len(costs) != len(model._modules):
                raise PartitionError(f"{len(costs)} costs given for {len(model._modules)} layers; give one per layer")
            if not _does_more(model):
                names, layers = zip(*model._modules.items(), strict=True)  # named_children leaves out repeated layers
                ranges = partition(parameter_costs(layers) if costs is None else costs, num_stages)
                return [Stage({names[i]: layers[i] for i in part}, list(part)) for part in ranges]
            own = type(model).forward is not nn.Sequential.forward or "forward" in model.__dict__
            calling = with_arguments if own else with_one_argument
        if num_stages > 1:
            return list(split(model, num_stages, costs=costs))
        return [model if isinstance(model, Stage) else WholeModel(model, calling)]
    sources: Sequence[StageSource] = list(model)
    if len(sources) != num_stages:
        if isinstance(model, Split):
            raise PartitionError(
                f"the model was split into {len(sources)} stages, and the schedule has {num_stages}; split it by "
                f"ps.split(model, {num_stages}), or by at= with the layer that each stage but the first begins with"
            )
        raise PartitionError(
            f"{len(sources)} stage modules for a schedule of {num_stages} stages; pass one per stage"
        )
    return list(sources)


def _does_more(model: nn.Sequential) -> bool:
    """Returns whether a sequential does or holds something beside its layers."""
    names = ("forward", "__call__", "__iter__")
    has_own = any(getattr(type(model), name) is not getattr(nn.Sequential, name) for name in names)
    has_tensors = any(each is not None for each in (*model._parameters.values(), *model._buffers.values()))
    return has_own or has_tensors or "forward" in vars(model) or bool(why_closed(model))


def build_stage(source: Stage | StageSource, index: int, num_stages: int) -> Stage:
    """Makes a stage of a module, or of a function that returns one: a stage of one layer, named by its number.

    The only stage of a model has no name, so its parameters have the same names as in any other number of stages.

    Raises:
        RuntimeFailure: the function returned no module, or one that cannot be a stage.
    """
    module = source if isinstance(source, nn.Module) else source()
    if not isinstance(module, nn.Module):
        raise RuntimeFailure(f"stage {index}: its function returned {type(module).__name__}, not a module")
    if isinstance(module, Stage):
        return module
    require_stage(module, f"stage {index}")
    return Stage({str(index) if num_stages > 1 else WHOLE: module}, [index], with_arguments)


@contextmanager
def evaluating(model: nn.Module | Sequence[StageSource], stages: Iterable[nn.Module]) -> Iterator[None]:
    """Puts stages into evaluation mode, and puts them back at the end.

    A module's own `train` may do more than note the mode: it may add adapters to a weight, and take them out again.
    So `eval` is called as a user calls it: on the whole model, and on stages that are no part of the model.

    Args:
        model: as it was given, whole or in parts.
    """
    whole = model.model if isinstance(model, Split) else model
    roots = [*([whole] if isinstance(whole, nn.Module) else []), *stages]
    before = {module: module.training for root in roots for module in root.modules()}
    try:
        for root in reversed(roots):  # what the model's own `eval` does is last
            root.eval()
        yield
    finally:
        for module, training in before.items():
            if type(module).train is not nn.Module.train or "train" in vars(module):
                module.train(training)
        for module, training in before.items():
            module.training = training
