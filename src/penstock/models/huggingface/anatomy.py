"""What a causal language model is made of: which modules come before the blocks, which are the blocks, which follow.

Found by looking for the list of blocks and by running the model's own code over stand-ins, so no table of
architectures is needed; what does not fit is refused by name, never cut wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.models.huggingface.frame import Catcher, Stopped, hollow, stand_in

__all__ = ["Anatomy", "DecoderError", "examine"]

BY_HAND = (
    "name the list yourself, Decoder(..., blocks='transformer.h'), or write one module per stage and give "
    "ps.Pipeline the list of them"
)


class DecoderError(ValueError):
    """A model that is not a decoder we can cut, or a folder that does not hold one."""


@dataclass(frozen=True)
class Anatomy:
    """Paths of modules in a model.

    Attributes:
        blocks: of the list of blocks. num_blocks: how many are in it.
        before, after: of what has weights and is called before, and after, the blocks.
        loose: of what has none, like rotary embeddings and dropout.
        returns_tuple: whether a block returns a tuple whose first entry are the hidden states.
    """

    blocks: str
    num_blocks: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    loose: tuple[str, ...]
    returns_tuple: bool


def examine(model: Any, blocks: str | None = None) -> Anatomy:
    """Finds the parts of a `PreTrainedModel`, whose weights may lie on the meta device.

    Raises:
        DecoderError: says what was looked for, what was found, and how to cut by hand.
    """
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise DecoderError(f"{name} has an encoder and a decoder; a decoder alone was looked for. {BY_HAND}")
    if getattr(model.config, "layerdrop", 0.0):
        raise DecoderError(
            f"{name} leaves out blocks at random (config.layerdrop {model.config.layerdrop}); set it to 0"
        )
    path = _block_list(model, name) if blocks is None else _named_list(model, name, blocks)
    parts, loose = _around(model, path, name)
    reasons = []
    for returns_tuple in (False, True):
        try:
            before, after = _trace(model, path, parts, returns_tuple)
        except Exception as error:  # whatever the model's code raises over stand-ins, it does not fit
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        unused = [part for part in parts if part not in before and part not in after]
        if unused and not _sees(model):
            raise DecoderError(f"{name} has {unused[0]}, which its forward on tokens does not call. {BY_HAND}")
        before = [*before, *unused]  # a tower for images, whose features take the place of some embeddings
        count = len(blocks_of(model, path))
        return Anatomy(path, count, tuple(before), tuple(after), tuple(loose), returns_tuple)
    raise DecoderError(
        f"{name}: the code around its blocks {path!r} does not run apart from them ({reasons[0]}); looked for an "
        f"embedding, blocks that pass on hidden states, and a norm and head that return logits. {BY_HAND}"
    )


def blocks_of(model: nn.Module, path: str) -> nn.ModuleList:
    """The list of blocks, in which a shared block stands as often as it is called."""
    return cast(nn.ModuleList, model.get_submodule(path))


def has_routers(config: Any) -> bool:
    """Whether a config asks for the loss of a mixture's routers."""
    return bool(getattr(config.get_text_config(decoder=True), "output_router_logits", False))


def _block_list(model: Any, name: str) -> str:
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    found = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and any(True for _ in module.parameters())
    ]
    outer = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    if len(outer) > 1:  # a tower for images may be as deep
        outer = [path for path in outer if _config_around(model, path) is config] or outer
    if len(outer) == 1:
        return outer[0]
    lists = {path: len(m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    there = ", ".join(f"{path} of {length}" for path, length in lists.items()) or "none"
    raise DecoderError(
        f"{name}: looked for one list of {count} blocks (config.num_hidden_layers) and found {len(outer)}; its "
        f"lists are {there}. {BY_HAND}"
    )


def _sees(model: Any) -> bool:
    """Whether a model takes images, sound or the like besides tokens."""
    return model.config.get_text_config(decoder=True) is not model.config


def _config_around(model: nn.Module, path: str) -> Any:
    """That of the nearest module above `path` which has one."""
    while path:
        path = path.rpartition(".")[0]
        if (config := getattr(model.get_submodule(path), "config", None)) is not None:
            return config
    return None


def _named_list(model: Any, name: str, path: str) -> str:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if not isinstance(module, nn.ModuleList) or not len(module):
        lists = [p for p, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        raise DecoderError(f"{name} has no list of blocks {path!r}; its lists are {', '.join(lists) or 'none'}")
    return path


def _around(model: nn.Module, blocks: str, name: str) -> tuple[list[str], list[str]]:
    """Paths of the modules around the blocks, as near to the root as they can be: with weights, and without."""
    parts: list[str] = []
    loose: list[str] = []
    for path, module in _outside(model, blocks):
        (parts if any(True for _ in module.parameters()) else loose).append(path)
    steps = blocks.split(".")
    for depth in range(len(steps)):
        holder = ".".join(steps[:depth])
        if own := list(model.get_submodule(holder)._parameters):
            where = holder or "the model"
            raise DecoderError(f"{name}: {where} has a weight of its own, {own[0]}, beside its modules. {BY_HAND}")
    return parts, loose


def _outside(module: nn.Module, blocks: str, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if blocks.startswith(f"{below}."):
            yield from _outside(child, blocks, below)
        elif below != blocks:
            yield below, child


def _trace(model: nn.Module, blocks: str, parts: list[str], returns_tuple: bool) -> tuple[list[str], list[str]]:
    """Which parts the model's code calls before the blocks and which after, seen by running it over stand-ins.

    Raises whatever that raises; ValueError where blocks get something that follows from the embeddings.
    """
    called: list[tuple[str, tuple[Any, ...]]] = []
    catchers = [Catcher(block, returns_tuple) for block in blocks_of(model, blocks)]
    fill: dict[str, nn.Module] = {part: stand_in(model.get_submodule(part)) for part in parts}
    frame = hollow(model, {**fill, blocks: nn.ModuleList(catchers)})
    tokens = torch.zeros(2, 3, dtype=torch.long)
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    if has_routers(model.config):
        given["output_router_logits"] = False  # there are no routers among stand-ins
    with torch.no_grad():
        marked = torch.zeros_like(_embedded(frame, catchers[0], given))
        for path, module in [*fill.items(), *((str(index), catcher) for index, catcher in enumerate(catchers))]:
            module.register_forward_pre_hook(_noting(called, path), with_kwargs=True)
        catchers[0].instead = marked
        frame(**given)
    order = [path for path, _ in called]
    wanted = [str(i) for i in range(len(catchers))]
    if [path for path in order if path in wanted] != wanted:
        raise ValueError("its blocks are not called once each and in order")
    first, last = order.index(wanted[0]), order.index(wanted[-1])
    if between := [path for path in order[first:last] if path not in wanted]:
        raise ValueError(f"{between[0]} is called between blocks")
    if not any(each is marked for each in called[first + 1][1] if isinstance(each, Tensor)):
        raise ValueError("what a block returns is not what the next module is given")
    _require_independent(catchers, called[first][1])
    before, after = order[:first], order[last + 1 :]
    if both := set(before) & set(after):
        raise ValueError(f"{both.pop()} is called before the blocks and after them")
    return list(dict.fromkeys(before)), list(dict.fromkeys(after))


def _embedded(frame: nn.Module, first: Catcher, given: dict[str, Any]) -> Tensor:
    """What the first block is given."""
    first.stops = True
    try:
        frame(**given)
    except Stopped as stopped:
        return stopped.hidden
    finally:
        first.stops = False
    raise ValueError("no block is called")


def _noting(called: list[tuple[str, tuple[Any, ...]]], path: str) -> Callable[..., None]:
    return lambda _, args, kwargs: called.append((path, (*args, *kwargs.values())))


def _require_independent(catchers: list[Catcher], first_given: tuple[Any, ...]) -> None:
    """What blocks get beside the hidden states must follow from places and masks alone, not from embeddings."""
    embedded = next(each for each in first_given if isinstance(each, Tensor))
    for index, catcher in enumerate(catchers):
        assert catcher.given is not None
        args, kwargs = catcher.given
        for name, value in [*((f"argument {i + 1}", a) for i, a in enumerate(args)), *kwargs.items()]:
            if value is embedded or (isinstance(value, Tensor) and value.shape == embedded.shape):
                raise ValueError(
                    f"block {index} is given {name}, of the shape of embeddings, beside the hidden states"
                )
