"""The model's own code without its weights: a stand-in replaces every module that has weights.

The model's own forward works out what a decoder's blocks take besides the hidden states: masks, positions, rotary
embeddings. Run with stand-ins it works out the same, without a weight:

    model                               frame of a stage with blocks
      embed_tokens  V x D                 a stand-in that returns zeros
      layers        n blocks              n BlockRecorders: each notes the arguments of its block
      norm, lm_head                       stand-ins that return their input
      rotary_emb    (no weights)          rotary_emb

So an architecture is cut as it is, and no forward is written anew.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a block besides the hidden states."""
HOOKED = "_output_capturing_hooks_installed"
"""The mark that transformers leaves on a model whose blocks have its hooks. Stand-ins for them have none yet."""
HOLLOW = "_is_hollow"
"""The mark of a module that stands for one of the model and runs its code."""


class StoppedAtBlock(Exception):
    """The model's code has reached the block at which it was to stop."""

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
    """Has a module's plain attributes, which the code around it may ask for, and the shapes and types of its weights.

    Args:
        answer: what the stand-in returns for its arguments.
    """

    def __init__(self, original: nn.Module, answer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._elsewhere = UnregisteredModule(original)
        self._answer = answer
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self._answer is not None
        return self._answer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__["_elsewhere"].module, name)
            if isinstance(value, nn.Module):
                return FrameStandIn(value)  # for its attributes, as it can't be called
            return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _zeros(width: int, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Tensor:
    """What an embedding would return, as zeros; or embeddings that are among the arguments."""
    if isinstance(embedded := kwargs.get("inputs_embeds"), Tensor):
        return embedded
    given = (*args, *kwargs.values())
    ids = next((value for value in given if isinstance(value, Tensor)), None)
    if ids is None:  # some positions are looked up by the shape of the tokens
        shape = next(value for value in given if isinstance(value, torch.Size))
        return torch.zeros(shape[1], width, dtype=dtype)
    return torch.zeros(*ids.shape, width, dtype=dtype, device=ids.device)


def _first_feature(width: int, hidden: Tensor) -> Tensor:
    """The first number of each token, as often as a linear has outputs."""
    return hidden[..., :1].expand(*hidden.shape[:-1], width)


def _same(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden


class HiddenStatesStandIn(FrameStandIn):
    """In place of a module before a stack of blocks: returns given hidden states.

    Attributes:
        instead: the hidden states.
    """

    instead: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self.instead


class BlockRecorder(FrameStandIn):
    """In place of a block: notes the arguments of the block.

    The values that the block returns besides hidden states have stand-ins too, which the recorder recognizes among
    the arguments of the next block.

    Args:
        num_returned: 0 if the block returns hidden states alone, else the length of the tuple that it returns.
        stops: whether the model's code stops at this block.

    Attributes:
        given: the arguments besides the hidden states, after a run.
        instead: hidden states to return in place of the given ones.
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
    """A copy of a model on the meta device, for shapes. Every weight of it has a gradient."""
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
    """The argument that tells a model's forward to keep no cache; none if the forward does not take it."""
    known = inspect.signature(type(model).forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    return {"use_cache": False} if takes_any or "use_cache" in known else {}


def stand_in(original: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The stand-in for a module with weights. One for an embedding returns numbers of `dtype`."""
    if isinstance(original, nn.Linear) and original.in_features != original.out_features:
        return FrameStandIn(original, partial(_first_feature, original.out_features))
    inside = next((each for each in original.modules() if isinstance(each, nn.Embedding)), None)
    return FrameStandIn(original, _same if inside is None else partial(_zeros, inside.embedding_dim, dtype))


def hollow(model: nn.Module, fill: Mapping[str, nn.Module], path: str = "", is_told: bool = True) -> nn.Module:
    """The model with other modules at the paths that `fill` names; the model itself stays as it is.

    If its forward cannot be told to keep no cache (`is_told` is false), copies of the configs say so.
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
