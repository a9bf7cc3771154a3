"""Finds the parts of a language model: the modules before the blocks, the blocks, and the modules after them.

The search looks for the list of blocks and runs the model's own code over stand-ins, so Penstock needs no table of
architectures. A model that does not fit is refused by name. A model with an encoder has two stacks of blocks:

    layer    0                  1 .. e             e + 1                       e + 2 .. e + d + 1    e + d + 2
             stacks[0].before   stacks[0].blocks   stacks[1].before            stacks[1].blocks      after
                                                   (norm, embedding)

A tower for images before a decoder is a part of the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.models.huggingface.frame import BlockRecorder, StoppedAtBlock, encoded, hollow, stand_in, uncached

__all__ = ["Anatomy", "BlockStack", "DecoderError", "examine"]

READ = ("input_ids", "pixel_values")
"""The main inputs that Penstock knows: text, or pictures."""
BY_STAGES = "Write one module per stage and give ps.Pipeline the list of them"
BY_HAND = f"Name the list yourself, Decoder(..., blocks='transformer.h'). Or: {BY_STAGES}"

MOST_RETURNED = 3
"""The most values that a block may return."""


class DecoderError(ValueError):
    """A model that Penstock cannot cut, or a folder that holds no model."""


@dataclass(frozen=True)
class BlockStack:
    """A list of blocks in a model.

    Attributes:
        blocks: the path of the list.
        num_blocks: the number of blocks in the list.
        before: the paths of the modules with weights that are called before the blocks, but after those of an
            earlier stack.
        num_returned: 0 if a block returns hidden states, else the length of the tuple of which they are the first.
        carried: the other entries of this tuple that the next block takes, by number.
    """

    blocks: str
    num_blocks: int
    before: tuple[str, ...]
    num_returned: int = 0
    carried: tuple[int, ...] = ()


@dataclass(frozen=True)
class Anatomy:
    """The paths of a model's modules.

    Attributes:
        stacks: the decoder's blocks, after those of an encoder if the model has one.
        after: the paths of the modules with weights that are called after the last block.
        loose: the paths of the modules without weights, such as rotary embeddings and dropout.
        buffers: the names of the buffers that a checkpoint has and no module of a layer holds.
        given_as: the argument, by name or position, in which the decoder's blocks take the encoder's output.
        labels: the names of the labels with which the last layer calls the model's own forward for its loss. Empty
            if the loss follows from the logits.
    """

    stacks: tuple[BlockStack, ...]
    after: tuple[str, ...]
    loose: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    given_as: str | int = ""
    labels: tuple[str, ...] = ()

    @property
    def encoder(self) -> BlockStack | None:
        """The stack that reads a text for the decoder, if there is one."""
        return self.stacks[0] if len(self.stacks) > 1 else None

    @property
    def blocks(self) -> str:
        """The path of the decoder's list of blocks."""
        return self.stacks[-1].blocks

    @property
    def before(self) -> tuple[str, ...]:
        """The paths of the modules with weights that are called before the decoder's blocks."""
        return self.stacks[-1].before

    @property
    def carried(self) -> tuple[int, ...]:
        """The numbers of the values that a block of the decoder returns for the next one."""
        return self.stacks[-1].carried

    @property
    def keeps_inputs(self) -> bool:
        """Whether the inputs travel to the last layer, because the model's own head and loss may ask for them."""
        return bool(self.labels) and self.encoder is None

    @property
    def first_block(self) -> int:
        """The number of the layer that is the decoder's first block."""
        return self.num_layers - 1 - self.stacks[-1].num_blocks

    @property
    def num_layers(self) -> int:
        """All blocks, a layer before each stack of them, and a last layer."""
        return sum(stack.num_blocks + 1 for stack in self.stacks) + 1

    @property
    def lists(self) -> tuple[str, ...]:
        """The paths of the lists of blocks."""
        return tuple(stack.blocks for stack in self.stacks)

    def place(self, index: int) -> tuple[int, int]:
        """The stack of a layer and its block in the stack; -1 in place of the block for the layer before a stack.

        The last layer has the number of stacks in place of its stack.
        """
        for number, stack in enumerate(self.stacks):
            if index <= stack.num_blocks:
                return number, index - 1
            index -= stack.num_blocks + 1
        return len(self.stacks), -1

    def paths(self, index: int) -> tuple[str, ...]:
        """The paths of the modules with weights of a layer."""
        number, block = self.place(index)
        if number == len(self.stacks):
            return self.after
        stack = self.stacks[number]
        return stack.before if block < 0 else (f"{stack.blocks}.{block}",)


def examine(model: Any, blocks: str | None = None) -> Anatomy:
    """Finds the parts of a `PreTrainedModel`, whose weights may lie on the meta device.

    Args:
        blocks: the path of the list of blocks, if it cannot be found.

    Raises:
        DecoderError: says what was looked for, what was found, and how to cut by hand.
    """
    name = type(model).__name__
    for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(model.config, key, 0.0):
            raise DecoderError(
                f"{name} leaves out blocks at random (config.{key} {getattr(model.config, key)}); set it to 0"
            )
    if (read := getattr(model, "main_input_name", READ[0])) not in READ:
        raise DecoderError(f"{name} reads {read}, and only {' and '.join(READ)} are known here. {BY_STAGES}")
    lists = _block_lists(model, name, blocks)
    parts, loose, buffers = modules_around(model, lists, name)
    reasons = []
    for nums_returned in sorted(product(range(MOST_RETURNED + 1), repeat=len(lists)), key=max):
        try:
            traced = _trace(model, lists, parts, nums_returned)
        except Exception as error:  # whatever the model's code raises over stand-ins, it does not fit
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        called = {part for stack in traced.stacks for part in stack.before} | set(traced.after)
        unused = _without_copies(model, called, [part for part in parts if part not in called])
        sees = model.config.get_text_config(decoder=True) is not model.config  # images, sound or the like
        if unused and (len(lists) > 1 or not sees):
            raise DecoderError(f"{name} has {unused[0]}, which its forward on tokens does not call. {BY_STAGES}")
        # An unused part is a tower for images, whose features take the place of some embeddings.
        last = replace(traced.stacks[-1], before=(*traced.before, *unused))
        return replace(traced, stacks=(*traced.stacks[:-1], last), loose=tuple(loose), buffers=tuple(buffers))
    if "padding token" in reasons[0]:
        raise DecoderError(
            f"{name} reads the last token of each text, and does not know which are padding ({reasons[0]}); set "
            "model.config.pad_token_id to the tokenizer's"
        )
    unlabelled = " It is run without labels: let its forward work out a loss only where labels are given."
    raise DecoderError(
        f"{name}: the code around its blocks {' and '.join(map(repr, lists))} does not run apart from them "
        f"({reasons[0]}).{unlabelled * ('NoneType' in reasons[0])} Penstock looked for an embedding, blocks that "
        f"pass on hidden states, and a norm and head. {BY_STAGES}"
    )


def _without_copies(model: nn.Module, called: set[str], unused: list[str]) -> list[str]:
    """The modules that are not called and whose weights are not those of called modules."""
    known = {id(p) for part in called for p in model.get_submodule(part).parameters()}
    return [part for part in unused if any(id(p) not in known for p in model.get_submodule(part).parameters())]


def blocks_of(model: nn.Module, path: str) -> nn.ModuleList:
    """The list of blocks, in which a shared block stands as often as it is called."""
    return cast(nn.ModuleList, model.get_submodule(path))


def has_routers(config: Any) -> bool:
    """Whether a config asks for the loss of a mixture's routers."""
    return bool(getattr(config.get_text_config(decoder=True), "output_router_logits", False))


def has_encoder(config: Any) -> bool:
    """Whether a config is of a model with an encoder and a decoder."""
    return bool(getattr(config, "is_encoder_decoder", False))


def _block_lists(model: Any, name: str, blocks: str | None) -> list[str]:
    """The path of each list of blocks: the encoder's and the decoder's, or the only one. Raises DecoderError."""
    if not has_encoder(model.config):
        return [_only_list(model, name) if blocks is None else _named_list(model, name, blocks)]
    if blocks is not None:
        raise DecoderError(f"{name} has two lists of blocks, and {blocks!r} is one path; leave it out")
    paths = {id(module): path for path, module in model.named_modules()}
    lists = []
    for stack, what in ((model.get_encoder(), "encoder"), (model.get_decoder(), "decoder")):
        found = _outermost_lists(stack)
        if len(found) != 1 or id(stack) not in paths:
            raise DecoderError(
                f"{name}: looked for one list of blocks in its {what} and found {len(found)}: "
                f"{', '.join(found) or 'none'}. {BY_STAGES}"
            )
        lists.append(f"{paths[id(stack)]}.{found[0]}")
    return lists


def _only_list(model: Any, name: str) -> str:
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    found = _outermost_lists(model, count)
    if len(found) > 1:  # a tower for images may be as deep
        found = [path for path in found if _config_around(model, path) is config] or found
    if len(found) == 1:
        return found[0]
    lists = {path: len(m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    there = ", ".join(f"{path} of {length}" for path, length in lists.items()) or "none"
    raise DecoderError(
        f"{name}: looked for one list of {count} blocks (config.num_hidden_layers) and found {len(found)}; its "
        f"lists are {there}. {BY_HAND}"
    )


_ANY_LENGTH = -1


def _outermost_lists(module: nn.Module, length: int | None = _ANY_LENGTH) -> list[str]:
    """The paths of the lists of modules with weights that lie in no other such list."""
    found = [
        path
        for path, each in module.named_modules()
        if isinstance(each, nn.ModuleList)
        and length in (_ANY_LENGTH, len(each))
        and any(True for _ in each.parameters())
    ]
    return [path for path in found if not any(path.startswith(f"{other}.") for other in found)]


def _config_around(model: nn.Module, path: str) -> Any:
    """The config of the nearest module above `path` that has one."""
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


def modules_around(model: nn.Module, lists: Sequence[str], name: str) -> tuple[list[str], list[str], list[str]]:
    """The modules around the blocks, as near to the root as they can be.

    Returns:
        The paths of the modules with weights, the paths of those without, and the names of the buffers that modules
        above them keep in a checkpoint.
    """
    parts: list[str] = []
    loose: list[str] = []
    for path, module in _outside(model, lists):
        (parts if any(True for _ in module.parameters()) else loose).append(path)
    buffers: list[str] = []
    holders = {".".join(path.split(".")[:depth]) for path in lists for depth in range(len(path.split(".")))}
    for holder in sorted(holders):
        module = model.get_submodule(holder)
        if own := list(module._parameters):
            where = holder or "the model"
            raise DecoderError(f"{name}: {where} has a weight of its own, {own[0]}, beside its modules. {BY_STAGES}")
        kept = [key for key in module._buffers if key not in module._non_persistent_buffers_set]
        buffers += [f"{holder}.{key}".removeprefix(".") for key in kept]
    return parts, loose, buffers


def _outside(module: nn.Module, lists: Sequence[str], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if any(each.startswith(f"{below}.") for each in lists):
            yield from _outside(child, lists, below)
        elif below not in lists:
            yield below, child


def _trace(model: Any, lists: Sequence[str], parts: list[str], nums_returned: Sequence[int]) -> Anatomy:
    """The parts that the model's code calls before, between and after the lists of blocks, seen by running it over
    stand-ins.

    Raises:
        ValueError: the blocks take a value that follows from the embeddings, or are not called in a row.
        Exception: whatever the model's code raises over stand-ins.
    """
    recorders = {
        path: [BlockRecorder(block, num) for block in blocks_of(model, path)]
        for path, num in zip(lists, nums_returned, strict=True)
    }
    fill: dict[str, nn.Module] = {part: stand_in(model.get_submodule(part)) for part in parts}
    frame = hollow(model, {**fill, **{path: nn.ModuleList(each) for path, each in recorders.items()}})
    given = _sample(model)
    called: list[tuple[str, tuple[Any, ...]]] = []
    named = {f"{path}.{index}": each for path, stack in recorders.items() for index, each in enumerate(stack)}
    with torch.no_grad():
        for stack in recorders.values():
            stack[0].instead = torch.zeros_like(_embedded(frame, stack[0], given))
        for path, module in {**fill, **named}.items():
            module.register_forward_pre_hook(noting(called, path), with_kwargs=True)
        frame(**given)
        order = [path for path, _ in called]
        around: list[tuple[str, ...]] = []
        begin = 0
        for path, stack in recorders.items():
            wanted = [f"{path}.{index}" for index in range(len(stack))]
            if [other for other in order if other in wanted] != wanted:
                raise ValueError("its blocks are not called once each and in order")
            first, last = order.index(wanted[0]), order.index(wanted[-1])
            if between := [other for other in order[first:last] if other not in wanted]:
                raise ValueError(f"{between[0]} is called between blocks")
            if not any(value is stack[0].instead for value in called[first + 1][1] if isinstance(value, Tensor)):
                raise ValueError("what a block returns is not what the next module is given")
            around.append(tuple(dict.fromkeys(order[begin:first])))
            begin = last + 1
        around.append(tuple(dict.fromkeys(order[begin:])))
        given_as = _where_encoded(frame, recorders[lists[-1]], given) if len(lists) > 1 else ""
    everywhere = [part for each in around for part in each]
    if twice := [part for part in everywhere if everywhere.count(part) > 1]:
        raise ValueError(f"{twice[0]} is called before the blocks and after them")
    stacks = [
        BlockStack(path, len(stack), before, num, carried_by(stack, None if path == lists[0] else given_as))
        for (path, stack), before, num in zip(recorders.items(), around[:-1], nums_returned, strict=True)
    ]
    return Anatomy(tuple(stacks), around[-1], given_as=given_as)


def _sample(model: Any) -> dict[str, Any]:
    """Arguments for a small run of a model's forward: text, or pictures."""
    tokens = torch.zeros(2, 3, dtype=torch.long)
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **uncached(model)}
    if getattr(model, "main_input_name", READ[0]) != READ[0]:
        given = {model.main_input_name: torch.zeros(2, 3, 5, 5)}  # channels and pixels, which stand-ins pass on
    if has_encoder(model.config):
        given["decoder_input_ids"] = torch.zeros(2, 4, dtype=torch.long)  # of another length than the encoder's
    if has_routers(model.config):
        given["output_router_logits"] = False  # there are no routers among stand-ins
    return given


def _where_encoded(frame: nn.Module, recorders: Sequence[BlockRecorder], given: dict[str, Any]) -> str | int:
    """The argument in which all blocks of a decoder take the encoder's output."""
    tokens = given["input_ids"]
    width = recorders[0].instead.shape[-1] if recorders[0].instead is not None else 1
    marked = torch.zeros(*tokens.shape, width)
    frame(encoder_outputs=encoded(marked), **{key: each for key, each in given.items() if key != "input_ids"})
    places: list[list[str | int]] = []
    for recorder in recorders:
        places.append([key for key, value in recorder.arguments if value is marked])
    if not places[0] or any(each != places[0] for each in places):
        raise ValueError("its decoder's blocks are not all given what the encoder's last one returns")
    return places[0][0]


def _embedded(frame: nn.Module, first: BlockRecorder, given: dict[str, Any]) -> Tensor:
    """The hidden states that the first block of a list takes."""
    first.stops = True
    try:
        frame(**given)
    except StoppedAtBlock as stopped:
        return stopped.hidden
    finally:
        first.stops = False
    raise ValueError("no block is called")


def noting(called: list[tuple[str, tuple[Any, ...]]], path: str) -> Callable[..., None]:
    """A hook that notes the calls of the module at a path, and their arguments."""
    return lambda _, args, kwargs: called.append((path, (*args, *kwargs.values())))


def carried_by(recorders: Sequence[BlockRecorder], given_as: str | int | None) -> tuple[int, ...]:
    """The values besides hidden states that a block returns and the next one takes, by number.

    All other arguments must follow from places and masks alone, not from embeddings.

    Args:
        given_as: the argument that has the encoder's output; None if there is none.
    """
    embedded = recorders[0].instead
    carried: set[int] = set()
    for index, recorder in enumerate(recorders):
        for key, value in recorder.arguments:
            if not isinstance(value, Tensor) or key == given_as:
                continue
            number = recorders[index - 1].number_of(value) if index else None
            name = f"argument {key + 1}" if isinstance(key, int) else key
            if number is not None:
                carried.add(number)
            elif any(other.number_of(value) is not None for other in recorders):
                raise ValueError(f"block {index} is given {name}, which an earlier block than the last one returned")
            elif value is embedded or (embedded is not None and value.shape == embedded.shape):
                raise ValueError(
                    f"block {index} is given {name}, of the shape of embeddings, beside the hidden states"
                )
    return tuple(sorted(carried))
