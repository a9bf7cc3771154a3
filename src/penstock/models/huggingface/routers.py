"""The routers of a mixture of experts, and the loss that makes them use all experts alike.

This loss is one number that depends on the logits of all routers, so it is not a sum over stages. Router logits
travel along the pipeline with the hidden states, and the model's own code computes the loss where the head is.

    block 0 ---- hidden, (r0) ----> block 1 ---- hidden, (r0, r1) ----> ... ----> head: logits, the loss of r0 .. rn
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.models.huggingface.anatomy import Anatomy, has_routers

__all__ = ["ROUTED", "RouterLogits", "RouterOutput", "Routers", "routers_of"]

ROUTED = "router_logits"


@dataclass(frozen=True)
class Routers:
    """Where a model's router logits come from.

    Attributes:
        kind: the class of the routers.
        index: the entry of a router's output that has its logits, if the output is a tuple.
        holder: the path of the module that holds the blocks.
        coefficient: the factor of the loss.
    """

    kind: type[nn.Module]
    index: int
    holder: str
    coefficient: float

    def listen(self, block: nn.Module) -> RouterLogits:
        """The logits of a block's routers, if it has any, from now on."""
        heard = RouterLogits(self.index)
        for module in block.modules():
            if isinstance(module, self.kind):
                for number, hook in list(module._forward_hooks.items()):
                    if isinstance(hook, RouterLogits):  # of a layer made before of the same block
                        del module._forward_hooks[number]
                module.register_forward_hook(heard)
        return heard

    def returned_by(self, frame: nn.Module) -> RouterOutput:
        """Makes the module that holds the blocks in a frame return the router logits that the hook is given."""
        hook = RouterOutput()
        holder = frame.get_submodule(self.holder)
        holder.__dict__["_forward_hooks"] = OrderedDict()  # those of the whole model stay as they are
        holder.register_forward_hook(hook)
        return hook

    def loss(self, out: Any) -> Tensor:
        """The loss in a model's output, times its coefficient."""
        loss: Tensor = self.coefficient * out.aux_loss
        return loss


class RouterLogits:
    """A hook of routers, which keeps their logits."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._logits: list[Tensor] = []

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        self._logits.append(out if isinstance(out, Tensor) else out[self._index])

    def taken(self) -> tuple[Tensor, ...]:
        """The logits since the last call."""
        logits, self._logits = tuple(self._logits), []
        return logits


class RouterOutput:
    """A hook of the module that holds the blocks, which puts given router logits into its output."""

    def __init__(self) -> None:
        self.logits: tuple[Tensor, ...] = ()

    def __call__(self, module: nn.Module, args: Any, out: Any) -> Any:
        out[ROUTED] = self.logits
        return out


def routers_of(model: Any, anatomy: Anatomy) -> Routers | None:
    """The routers whose loss a model adds by its config, as transformers itself records their logits.

    The model's weights may lie on the meta device. None if its config asks for no such loss.
    """
    if not has_routers(model.config):
        return None
    holder = anatomy.blocks.rpartition(".")[0]
    recorder = (getattr(model.get_submodule(holder), "_can_record_outputs", None) or {}).get(ROUTED)
    coefficient = getattr(model, "router_aux_loss_coef", None)
    if recorder is None or coefficient is None:
        return None
    return Routers(recorder.target_class, recorder.index, holder, float(coefficient))
