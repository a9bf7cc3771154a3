"""A stage: consecutive layers of a model, run one after the other, under the names they have in the whole model.

Checkpoints, optimizers and exports speak of parameters by these plain names, so they do not change with the
number of stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.models.chain import call_layer
from penstock.models.costs import estimate_costs
from penstock.models.gpt import GPTConfig, build_layers
from penstock.models.partition import partition

__all__ = ["Stage", "gpt_stage", "shared_parameters", "stages"]


class Stage(nn.Module):
    """Named layers in a chain; with the prefix "layers", layer "3" has the parameters "layers.3.weight" ...

    The first layer gets the stage's arguments, each other what the one before it returned: a tuple as its
    arguments, anything else, a dict included, as one argument.
    """

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], prefix: str = "") -> None:
        super().__init__()
        self._prefix = prefix
        holder: nn.Module = self
        if prefix:
            holder = nn.Module()
            self.add_module(prefix, holder)
        for name, layer in layers:
            holder.add_module(name, layer)

    @property
    def layers_by_name(self) -> dict[str, nn.Module]:
        """The layers in order, by their names in the whole model without the prefix."""
        holder: Any = self._modules[self._prefix] if self._prefix else self
        return dict(holder._modules)

    def forward(self, *args: Any) -> Any:
        # Read anew at every call, so that a layer that was replaced (compiled, wrapped) is the one that runs.
        holder: Any = self._modules[self._prefix] if self._prefix else self
        value: Any = args
        for layer in holder._modules.values():
            value = call_layer(layer, value)
        return value


def stages(
    model: nn.Sequential | nn.ModuleList | Sequence[nn.Module],
    num_stages: int,
    costs: Sequence[float] | None = None,
) -> list[Stage]:
    """Cuts a model into stages of about equal cost, sharing its modules and parameters with it.

    Parameters keep the names they have in a `nn.Sequential` or `nn.ModuleList`; the layers of a plain list are
    named "layers.0", "layers.1" and so on. `costs` is one number a layer, estimated from the weights unless
    given. `PartitionError` if there are more stages than layers, `ValueError` for a wrong number of costs.
    """
    if isinstance(model, nn.Sequential | nn.ModuleList):
        # Not named_children, which leaves out a module's second appearance.
        named, prefix = [(name, layer) for name, layer in model._modules.items() if layer is not None], ""
    elif isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ValueError(f"a {kind} cannot be cut into stages; give an nn.Sequential or a list of layers")
    else:
        named, prefix = [(str(index), layer) for index, layer in enumerate(model)], "layers"
    if costs is None:
        costs = estimate_costs([layer for _, layer in named])
    if len(costs) != len(named):
        raise ValueError(f"{len(costs)} costs given for a model of {len(named)} layers; give one a layer")
    return [Stage([named[i] for i in layers], prefix) for layers in partition(costs, num_stages)]


def gpt_stage(config: GPTConfig, layers: Iterable[int], seed: int = 0) -> Stage:
    """The stage of a GPT that holds these layers, without building any other."""
    indices = list(layers)
    return Stage(
        [(str(i), layer) for i, layer in zip(indices, build_layers(config, indices, seed))], "layers"
    )


def shared_parameters(parts: Iterable[nn.Module]) -> list[list[str]]:
    """Groups of plain names, of two or more, under which one Parameter object is found in these stages."""
    names: dict[Tensor, list[str]] = {}
    for part in parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            found = names.setdefault(parameter, [])
            if name not in found:
                found.append(name)
    return [group for group in names.values() if len(group) > 1]
