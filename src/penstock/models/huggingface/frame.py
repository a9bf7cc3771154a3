"""The model's own code without its weights: every module that has weights is replaced by a stand-in.

What a decoder's blocks are given besides the hidden states (masks, positions, rotary embeddings) is worked out by the
model's own forward. Run with stand-ins it works out the same, without a weight:

    model                               frame of a stage with blocks
      embed_tokens  V x D                 ZeroEmbedding
      layers        n blocks              n BlockRecorders: each notes what its block would be given
      norm, lm_head                       IdentityStandIn
      rotary_emb    (no weights)          rotary_emb

An architecture is thereby cut as it is, and no forward is written anew.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a block is given besides the hidden states."""
HOOKED = "_output_capturing_hooks_installed"
"""What transformers notes on a model whose blocks have its hooks, which stand-ins of them do not have yet."""
HOLLOW = "_is_hollow"
"""Says of a module that it stands for one of the model, whose code it runs."""


class StoppedAtBlock(Exception):
    """The model's code has come as far as it was to run."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("stopped at a block")
        self.hidden = hidden


class UnregisteredModule:
    """A module that is not ours: neither registered nor copied along."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> UnregisteredModule:
        return self


class FrameStandIn(nn.Module):
    """Has a module's plain attributes, which the code around it may ask for; of its weights only shapes and types."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._elsewhere = UnregisteredModule(original)
        self.training = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__["_elsewhere"].module, name)
            if isinstance(value, nn.Module):
                return FrameStandIn(value)  # for its attributes, as it can't be called
            return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


class ZeroEmbedding(FrameStandIn):
    """In place of an embedding: zeros of a type."""

    def __init__(self, original: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(original)
        self._dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = (*args, *kwargs.values())
        ids = next((value for value in given if isinstance(value, Tensor)), None)
        if ids is None:  # some positions are looked up by the shape of the tokens
            shape = next(value for value in given if isinstance(value, torch.Size))
            return torch.zeros(shape[1], self.embedding_dim, dtype=self._dtype)
        return torch.zeros(*ids.shape, self.embedding_dim, dtype=self._dtype, device=ids.device)


class ZeroEmbeddings(ZeroEmbedding):
    """In place of a module that embeds tokens, positions and more: embeddings that it is given, else zeros."""

    def __init__(self, original: nn.Module, width: int, dtype: torch.dtype) -> None:
        super().__init__(original, dtype)
        self.embedding_dim = width

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = kwargs.pop("inputs_embeds", None)
        return given if isinstance(given, Tensor) else super().forward(*args, **kwargs)


class IdentityStandIn(FrameStandIn):
    """In place of a norm, a linear or whatever else has weights: what it is given."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class WideningStandIn(FrameStandIn):
    """In place of a linear that changes the width: the first number it is given, as often as it has outputs."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[..., :1].expand(*hidden.shape[:-1], self.out_features)


class HiddenStatesStandIn(FrameStandIn):
    """In place of what comes before a list of blocks: hidden states of the shape that they have there.

    Attributes:
        instead: those.
    """

    instead: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self.instead


class BlockRecorder(FrameStandIn):
    """In place of a block: notes what the block would be given.

    What the block returns besides hidden states has stand-ins too, which are recognized where the next block is given
    them.

    Args:
        num_returned: 0 where the block returns hidden states alone, else the length of the tuple that it returns.

    Attributes:
        given: that, after a run.
        stops: whether the model's code shall run no further.
        instead: hidden states to give on in place of those that came.
    """

    def __init__(self, original: nn.Module, num_returned: int, stops: bool = False) -> None:
        super().__init__(original)
        self._num_returned = num_returned
        self._others = tuple(torch.zeros(()) for _ in range(num_returned - 1))
        self.stops = stops
        self.given: Arguments | None = None
        self.instead: Tensor | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # transformers records hidden states of modules of a block's class
        elsewhere = self.__dict__.get("_elsewhere")
        return BlockRecorder if elsewhere is None else type(elsewhere.module)

    @property
    def arguments(self) -> list[tuple[str | int, Any]]:
        """The arguments of the last run besides the hidden states, by name or position."""
        assert self.given is not None
        return [*enumerate(self.given[0]), *self.given[1].items()]

    def number_of(self, value: Any) -> int | None:
        """The entry of the block's output that a value stands for; None if it stands for none."""
        return next((number for number, other in enumerate(self._others, 1) if other is value), None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        self.given = args[1:], kwargs
        if self.stops:
            raise StoppedAtBlock(hidden)
        hidden = hidden if self.instead is None else self.instead
        return (hidden, *self._others) if self._num_returned else hidden


def on_meta(model: nn.Module) -> Any:
    """A copy on the meta device in which every weight has a gradient: for shapes, and for what follows from what."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.is_floating_point())
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)


def encoded(hidden: Tensor) -> Any:
    """Hidden states as an encoder returns them."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=hidden)


def uncached(model: nn.Module) -> dict[str, bool]:
    """What tells a model's forward to keep no cache; nothing where the forward takes no such argument."""
    known = inspect.signature(type(model).forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    return {"use_cache": False} if takes_any or "use_cache" in known else {}


def stand_in(original: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """What a module with weights is replaced by; embeddings give numbers of `dtype`."""
    if isinstance(original, nn.Embedding):
        return ZeroEmbedding(original, dtype)
    if isinstance(original, nn.Linear) and original.in_features != original.out_features:
        return WideningStandIn(original)
    inside = next((each for each in original.modules() if isinstance(each, nn.Embedding)), None)
    return IdentityStandIn(original) if inside is None else ZeroEmbeddings(original, inside.embedding_dim, dtype)


def hollow(model: nn.Module, fill: Mapping[str, nn.Module], path: str = "", is_told: bool = True) -> nn.Module:
    """The model with other modules at the paths that `fill` names; the model itself stays as it is.

    Where its forward can't be told to keep no cache (`is_told`), copies of the configs say so.
    """
    is_told = is_told if path else bool(uncached(model))
    new = object.__new__(type(model))
    new.__dict__ = model.__dict__.copy()
    if not is_told and "config" in new.__dict__:
        new.__dict__["config"] = copy.copy(model.config)
        new.__dict__["config"].use_cache = False
    children: dict[str, nn.Module | None] = {}
    for name, child in model._modules.items():
        below = f"{path}.{name}" if path else name
        if child is None or below in fill:
            children[name] = fill.get(below)
        elif any(known.startswith(f"{below}.") for known in fill):
            children[name] = hollow(child, fill, below, is_told)
        else:
            children[name] = child
    new.__dict__["_modules"] = children
    new.__dict__["training"] = False
    new.__dict__[HOLLOW] = True
    new.__dict__.pop(HOOKED, None)
    return new


def set_mode(frame: nn.Module, is_training: bool) -> None:
    """Sets whether the code around modules is in training; the modules keep their own mode."""
    for module in frame.modules():
        if HOLLOW in module.__dict__:
            module.training = is_training
