"""From what the user gives, a model or a list of stages, to one `Stage` for each stage of the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from penstock.cost.cut import PartitionError, partition
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.stage import Stage, StageSource, with_arguments


def parameter_costs(layers: Sequence[nn.Module]) -> list[float]:
    """A layer's cost where nothing was measured: its parameters, and a little for being there."""
    return [1.0 + sum(p.numel() for p in layer.parameters()) for layer in layers]


def stages_of(
    model: nn.Module | Sequence[StageSource], num_stages: int, costs: Sequence[float] | None = None
) -> list[Stage | StageSource]:
    """The stages of `model`, in order. Factories are left for `build_stage` to call where they are needed.

    Args:
        model: an `nn.Sequential` (cut by cost), any module for one stage, or a list with one module, or
            function that makes one, for each stage.
        costs: of each layer of the sequential; by default its number of parameters.

    Raises:
        PartitionError: more stages than layers, or a list of another length than the schedule's stages.
    """
    if isinstance(model, nn.Sequential) and (num_stages > 1 or len(model) > 0):
        names, layers = zip(*model._modules.items(), strict=True)  # named_children leaves out repeated layers
        if costs is not None and len(costs) != len(layers):
            raise PartitionError(f"{len(costs)} costs given for {len(layers)} layers")
        ranges = partition(parameter_costs(layers) if costs is None else costs, num_stages)
        return [Stage({names[i]: layers[i] for i in part}, list(part)) for part in ranges]
    sources: Sequence[StageSource] = [model] if isinstance(model, nn.Module) else list(model)
    if len(sources) != num_stages:
        hint = "pass an nn.Sequential to have it cut" if isinstance(model, nn.Module) else "pass one a stage"
        raise PartitionError(f"{len(sources)} stage modules for a schedule of {num_stages} stages; {hint}")
    return list(sources)


def build_stage(source: Stage | StageSource, index: int) -> Stage:
    """The stage itself; a bare module becomes a stage of one layer named by the stage's number."""
    module = source if isinstance(source, nn.Module) else source()
    if not isinstance(module, nn.Module):
        raise RuntimeFailure(f"stage {index}: its function returned {type(module).__name__}, not a module")
    return module if isinstance(module, Stage) else Stage({str(index): module}, [index], with_arguments)


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
