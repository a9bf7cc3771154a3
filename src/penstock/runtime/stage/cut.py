"""Turns what the user gives, a model or a list of stages, into one `Stage` for each stage of the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from penstock.cost.cut import PartitionError, partition
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.stage.partitioning import Split, split
from penstock.runtime.stage.partitioning.cutting import parameter_costs
from penstock.runtime.stage.split_backward import is_compiled
from penstock.runtime.stage.stage import Stage, StageSource, require_stage, with_arguments, with_one_argument

_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}


def stages_of(
    model: nn.Module | Sequence[StageSource], num_stages: int, costs: Sequence[float] | None = None
) -> list[Stage | StageSource]:
    """The stages of `model`, in order. Factories are left for `build_stage` to call where they are needed.

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
    if isinstance(model, nn.Sequential) and (num_stages > 1 or len(model) > 0):
        if costs is not None and len(costs) != len(model._modules):
            raise PartitionError(f"{len(costs)} costs given for {len(model._modules)} layers; give one per layer")
        more = beside_layers(model)
        if more and num_stages == 1:
            own = type(model).forward is not nn.Sequential.forward or "forward" in model.__dict__
            return [Stage({"0": model}, [0], with_arguments if own else with_one_argument)]
        if more:
            return list(split(model, num_stages, costs=costs))
        names, layers = zip(*model._modules.items(), strict=True)  # named_children leaves out repeated layers
        ranges = partition(parameter_costs(layers) if costs is None else costs, num_stages)
        return [Stage({names[i]: layers[i] for i in part}, list(part)) for part in ranges]
    if isinstance(model, nn.Module) and num_stages > 1:
        return list(split(model, num_stages, costs=costs))
    sources: Sequence[StageSource] = [model] if isinstance(model, nn.Module) else list(model)
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


def beside_layers(model: nn.Sequential) -> list[str]:
    """In words, what a sequential does or holds that is not in its layers."""
    kind, plain, found = type(model), nn.Sequential, []
    if "parametrizations" in model._modules:
        found.append("parametrizations")
    if kind.forward is not plain.forward or "forward" in model.__dict__ or kind.__call__ is not plain.__call__:
        found.append("a forward of its own")
    if kind.__iter__ is not plain.__iter__:
        found.append("an order of its own (__iter__)")
    found += [words for attribute, words in _HOOKS.items() if getattr(model, attribute)]
    if is_compiled(model):
        found.append("a forward compiled by torch.compile as one piece (compile its layers instead)")
    found += [f"parameter {name!r}" for name, value in model._parameters.items() if value is not None]
    found += [f"buffer {name!r}" for name, value in model._buffers.items() if value is not None]
    return found


def build_stage(source: Stage | StageSource, index: int) -> Stage:
    """The stage itself; a bare module becomes a stage of one layer named by the stage's number.

    Raises:
        RuntimeFailure: its function returned no module, or one that cannot be a stage.
    """
    module = source if isinstance(source, nn.Module) else source()
    if not isinstance(module, nn.Module):
        raise RuntimeFailure(f"stage {index}: its function returned {type(module).__name__}, not a module")
    if isinstance(module, Stage):
        return module
    require_stage(module, f"stage {index}")
    return Stage({str(index): module}, [index], with_arguments)


@contextmanager
def evaluating(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Stages in evaluation mode, and afterwards as they were."""
    stages = list(stages)
    modes = [(module, module.training) for stage in stages for module in stage.modules()]
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
