"""The routers of a mixture of experts, and the loss by which they learn to use all experts alike.

It is one number of what all routers of the model said, so it is no sum over stages: what each said goes along the
pipeline, and the model's own code works the loss out where the head is.

    block 0 ---- hidden, (r0) ----> block 1 ---- hidden, (r0, r1) ----> ... ----> head: logits, the loss of r0 .. rn
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.models.huggingface.anatomy import Anatomy, DecoderError, blocks_of, has_routers

__all__ = ["ROUTED", "RouterLogits", "Routers", "routers_of"]

ROUTED = "router_logits"


@dataclass(frozen=True)
class Routers:
    """Where a model's router logits come from.

    Attributes:
        kind: the class of the modules that say them. index: of them in what such a module returns, None where it
            returns nothing else.
        holder: path of the module that holds the blocks. coefficient: what the loss is multiplied with.
    """

    kind: type[nn.Module]
    index: int | None
    holder: str
    coefficient: float

    def listen(self, block: nn.Module) -> RouterLogits:
        """Hears the routers of a block, in which there may be none."""
        heard = RouterLogits(self.index)
        for module in block.modules():
            if isinstance(module, self.kind):
                for number, hook in list(module._forward_hooks.items()):
                    if isinstance(hook, RouterLogits):  # of a layer made before of the same block
                        del module._forward_hooks[number]
                module.register_forward_hook(heard)
        return heard

    def returned_by(self, frame: nn.Module) -> RouterOutput:
        """Has what holds the blocks in a frame return router logits that it is told."""
        hook = RouterOutput()
        holder = frame.get_submodule(self.holder)
        holder.__dict__["_forward_hooks"] = OrderedDict()  # those of the whole model stay as they are
        holder.register_forward_hook(hook)
        return hook

    def loss(self, out: Any) -> Tensor:
        """That of a model's output, times its coefficient."""
        loss: Tensor = self.coefficient * out.aux_loss
        return loss


class RouterLogits:
    """Hook of routers: keeps what they say."""

    def __init__(self, index: int | None) -> None:
        self._index = index
        self._logits: list[Tensor] = []

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        self._logits.append(out if self._index is None else out[self._index])

    def taken(self) -> tuple[Tensor, ...]:
        """What was said since the last time."""
        logits, self._logits = tuple(self._logits), []
        return logits


class RouterOutput:
    """Hook of what holds the blocks: its output has the router logits that came along."""

    def __init__(self) -> None:
        self.logits: tuple[Tensor, ...] = ()

    def __call__(self, module: nn.Module, args: Any, out: Any) -> Any:
        out[ROUTED] = self.logits
        return out


def routers_of(model: Any, anatomy: Anatomy, batch: dict[str, Tensor]) -> Routers | None:
    """The routers whose loss the model adds by its config; found by running it.

    Raises DecoderError where it returns router logits that no module of its blocks returns.
    """
    if not has_routers(model.config):
        return None
    returned: list[tuple[nn.Module, Any]] = []
    hooks = [
        module.register_forward_hook(lambda module, _, out: returned.append((module, out)))
        for block in blocks_of(model, anatomy.blocks)
        for module in block.modules()
    ]
    try:
        out = model(**batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    name = type(model).__name__
    wanted, coefficient = getattr(out, ROUTED, None), getattr(model, "router_aux_loss_coef", None)
    if not wanted or getattr(out, "aux_loss", None) is None or coefficient is None:
        return None
    found = {(type(module), _place_in(out, each)) for each in wanted for module, out in returned if _has(out, each)}
    if len(found) != 1:
        raise DecoderError(
            f"{name} has a loss of its routers (output_router_logits), and {len(found)} kinds of modules in its "
            "blocks return what that is made of; one was looked for. Set output_router_logits to false in its config"
        )
    kind, index = found.pop()
    return Routers(kind, index, anatomy.blocks.rpartition(".")[0], float(coefficient))


def _has(out: Any, wanted: Tensor) -> bool:
    return out is wanted or (isinstance(out, tuple) and any(each is wanted for each in out))


def _place_in(out: Any, wanted: Tensor) -> int | None:
    return None if out is wanted else next(i for i, each in enumerate(out) if each is wanted)
