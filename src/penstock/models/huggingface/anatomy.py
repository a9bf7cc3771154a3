"""What a language model is made of: which modules come before the blocks, which are the blocks, which follow.

Found by looking for the list of blocks and by running the model's own code over stand-ins, so no table of
architectures is needed; what does not fit is refused by name, never cut wrongly. A model with an encoder has two
lists:

    layer    0                1 .. e           e + 1                      e + 2 .. e + d + 1    e + d + 2
             encoder.before   encoder.blocks   before (norm, embedding)   blocks                after

A tower for images before a decoder is a part of the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from penstock.models.huggingface.frame import BlockRecorder, StoppedAtBlock, encoded, hollow, stand_in, uncached

__all__ = ["Anatomy", "DecoderError", "Encoder", "examine"]

READ = ("input_ids", "pixel_values")
"""What models read: text, or pictures."""
BY_STAGES = "Write one module per stage and give ps.Pipeline the list of them"
BY_HAND = f"Name the list yourself, Decoder(..., blocks='transformer.h'). Or: {BY_STAGES}"

MOST_RETURNED = 3
"""Things of a block."""


class DecoderError(ValueError):
    """A model that is not a decoder we can cut, or a folder that does not hold one."""


@dataclass(frozen=True)
class Encoder:
    """What of a model stands before its decoder.

    Attributes:
        blocks: path of its list of blocks. num_blocks: how many are in it. before: paths of what comes before them.
        num_returned: see `Anatomy`. carried: too.
        given_as: under which name, or as which positional argument, the decoder's blocks are given what it encoded.
    """

    blocks: str
    num_blocks: int
    before: tuple[str, ...]
    num_returned: int
    carried: tuple[int, ...]
    given_as: str | int


@dataclass(frozen=True)
class Anatomy:
    """Paths of modules in a model.

    Attributes:
        blocks: of the list of blocks, the decoder's where there is an encoder. num_blocks: how many are in it.
        before, after: of what has weights and is called before the blocks, but after those of an encoder, and after
            them.
        loose: of what has none, like rotary embeddings and dropout.
        buffers: names of what a checkpoint has of the modules around, and no module of a layer does.
        num_returned: 0 where a block returns hidden states, else the length of the tuple of which they are the first.
        carried: which of the others the next block is given.
        encoder: what reads a text before the decoder, for the decoder's blocks to look at; None where nothing does.
        labels: the names of the labels with which the last layer calls the model's own forward for its loss; none
            where the loss follows from the logits.
    """

    blocks: str
    num_blocks: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    loose: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    num_returned: int = 0
    carried: tuple[int, ...] = ()
    encoder: Encoder | None = None
    labels: tuple[str, ...] = ()

    @property
    def keeps_inputs(self) -> bool:
        """Whether the inputs go along to the last layer, as the model's own head and loss may ask for them."""
        return bool(self.labels) and self.encoder is None

    @property
    def first_block(self) -> int:
        """The layer that is the first of `blocks`."""
        return 1 if self.encoder is None else self.encoder.num_blocks + 2

    @property
    def num_layers(self) -> int:
        """All blocks, and a layer before and after each list of them."""
        return self.first_block + self.num_blocks + 1

    @property
    def lists(self) -> tuple[str, ...]:
        """Paths of the lists of blocks."""
        return (self.blocks,) if self.encoder is None else (self.encoder.blocks, self.blocks)

    def paths(self, index: int) -> tuple[str, ...]:
        """Of the modules with weights of a layer."""
        if index == self.num_layers - 1:
            return self.after
        if index >= self.first_block:
            return (f"{self.blocks}.{index - self.first_block}",)
        if index == self.first_block - 1:
            return self.before
        assert self.encoder is not None
        return self.encoder.before if index == 0 else (f"{self.encoder.blocks}.{index - 1}",)


class _TracedModel(NamedTuple):
    """What a run over stand-ins tells: what is called before each list of blocks, what after the last, what blocks
    are given of those before them, and as what the decoder's are given what was encoded.
    """

    around: list[list[str]]
    carried: list[tuple[int, ...]]
    given_as: str | int


def examine(model: Any, blocks: str | None = None) -> Anatomy:
    """Finds the parts of a `PreTrainedModel`, whose weights may lie on the meta device.

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
    if has_encoder(model.config):
        if blocks is not None:
            raise DecoderError(f"{name} has two lists of blocks, and {blocks!r} is one path; leave it out")
        lists = _two_lists(model, name)
    else:
        lists = [_block_list(model, name) if blocks is None else _named_list(model, name, blocks)]
    parts, loose, buffers = modules_around(model, lists, name)
    reasons = []
    for nums_returned in sorted(product(range(MOST_RETURNED + 1), repeat=len(lists)), key=max):
        try:
            traced = _trace(model, lists, parts, nums_returned)
        except Exception as error:  # whatever the model's code raises over stand-ins, it does not fit
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        return _anatomy(model, lists, traced, nums_returned, (parts, loose, buffers))
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


def _anatomy(
    model: Any,
    lists: Sequence[str],
    traced: _TracedModel,
    nums_returned: Sequence[int],
    found: tuple[list[str], list[str], list[str]],
) -> Anatomy:
    parts, loose, buffers = found
    *firsts, before, after = traced.around
    called = {part for each in traced.around for part in each}
    unused = _without_copies(model, called, [part for part in parts if part not in called])
    if unused and (firsts or not _sees(model)):
        raise DecoderError(
            f"{type(model).__name__} has {unused[0]}, which its forward on tokens does not call. {BY_STAGES}"
        )
    encoder = None
    if firsts:
        count = len(blocks_of(model, lists[0]))
        encoder = Encoder(lists[0], count, tuple(firsts[0]), nums_returned[0], traced.carried[0], traced.given_as)
    return Anatomy(
        lists[-1],
        len(blocks_of(model, lists[-1])),
        (*before, *unused),  # a tower for images, whose features take the place of some embeddings
        tuple(after),
        tuple(loose),
        tuple(buffers),
        nums_returned[-1],
        traced.carried[-1],
        encoder,
    )


def _without_copies(model: nn.Module, called: set[str], unused: list[str]) -> list[str]:
    """Of modules that are not called those whose weights are not those of called ones."""
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


def _two_lists(model: Any, name: str) -> list[str]:
    """The one list of blocks in the encoder, and the one in the decoder."""
    stacks = [model.get_encoder(), model.get_decoder()]
    paths = {id(module): path for path, module in model.named_modules()}
    found = []
    for stack, what in zip(stacks, ("encoder", "decoder"), strict=True):
        inside = [
            (path, module)
            for path, module in stack.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) and any(True for _ in module.parameters())
        ]
        outer = [path for path, _ in inside if not any(path.startswith(f"{other}.") for other, _ in inside)]
        if len(outer) != 1 or id(stack) not in paths:
            raise DecoderError(
                f"{name}: looked for one list of blocks in its {what} and found {len(outer)}: "
                f"{', '.join(outer) or 'none'}. {BY_STAGES}"
            )
        found.append(f"{paths[id(stack)]}.{outer[0]}")
    return found


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


def modules_around(model: nn.Module, lists: Sequence[str], name: str) -> tuple[list[str], list[str], list[str]]:
    """Paths of the modules around the blocks, as near to the root as they can be, with weights and without; and the
    names of what modules above them keep in a checkpoint themselves.
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


def _trace(model: Any, lists: Sequence[str], parts: list[str], nums_returned: Sequence[int]) -> _TracedModel:
    """Which parts the model's code calls before, between and after the lists of blocks, seen by running it over
    stand-ins.

    Raises whatever that raises; ValueError where blocks get something that follows from the embeddings.
    """
    called: list[tuple[str, tuple[Any, ...]]] = []
    recorders = [
        [BlockRecorder(block, num) for block in blocks_of(model, path)]
        for path, num in zip(lists, nums_returned, strict=True)
    ]
    fill: dict[str, nn.Module] = {part: stand_in(model.get_submodule(part)) for part in parts}
    frame = hollow(
        model, {**fill, **{path: nn.ModuleList(each) for path, each in zip(lists, recorders, strict=True)}}
    )
    tokens = torch.zeros(2, 3, dtype=torch.long)
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **uncached(model)}
    if getattr(model, "main_input_name", READ[0]) != READ[0]:
        given = {model.main_input_name: torch.zeros(2, 3, 5, 5)}  # channels and pixels, which stand-ins pass on
    if len(lists) > 1:
        given["decoder_input_ids"] = torch.zeros(2, 4, dtype=torch.long)  # of another length than the encoder's
    if has_routers(model.config):
        given["output_router_logits"] = False  # there are no routers among stand-ins
    named = dict(fill)
    for path, each in zip(lists, recorders, strict=True):
        named |= {f"{path}.{index}": recorder for index, recorder in enumerate(each)}
    with torch.no_grad():
        for each in recorders:
            each[0].instead = torch.zeros_like(_embedded(frame, each[0], given))
        for path, module in named.items():
            module.register_forward_pre_hook(noting(called, path), with_kwargs=True)
        frame(**given)
        order = [path for path, _ in called]
        around: list[list[str]] = []
        for path, each in zip(lists, recorders, strict=True):
            wanted = [f"{path}.{index}" for index in range(len(each))]
            if [other for other in order if other in wanted] != wanted:
                raise ValueError("its blocks are not called once each and in order")
            first, last = order.index(wanted[0]), order.index(wanted[-1])
            if between := [other for other in order[first:last] if other not in wanted]:
                raise ValueError(f"{between[0]} is called between blocks")
            if not any(value is each[0].instead for value in called[first + 1][1] if isinstance(value, Tensor)):
                raise ValueError("what a block returns is not what the next module is given")
            begin = 0 if not around else order.index(f"{lists[0]}.{len(recorders[0]) - 1}") + 1
            around.append(order[begin:first])
        around.append(order[last + 1 :])
        given_as: str | int = ""
        if len(lists) > 1:
            given_as = _where_encoded(frame, recorders[-1], given)
        carried = [
            carried_by(each, each[0].instead, given_as if number else None) for number, each in enumerate(recorders)
        ]
    around = [list(dict.fromkeys(parts)) for parts in around]
    everywhere = [part for parts in around for part in parts]
    if twice := [part for part in everywhere if everywhere.count(part) > 1]:
        raise ValueError(f"{twice[0]} is called before the blocks and after them")
    return _TracedModel(around, carried, given_as)


def _where_encoded(frame: nn.Module, recorders: Sequence[BlockRecorder], given: dict[str, Any]) -> str | int:
    """As which argument a decoder's blocks, all of them, are given what was encoded."""
    tokens = given["input_ids"]
    width = recorders[0].instead.shape[-1] if recorders[0].instead is not None else 1
    marked = torch.zeros(*tokens.shape, width)
    frame(encoder_outputs=encoded(marked), **{key: each for key, each in given.items() if key != "input_ids"})
    places: list[list[str | int]] = []
    for recorder in recorders:
        assert recorder.given is not None
        args, kwargs = recorder.given
        given_to: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
        places.append([key for key, value in given_to if value is marked])
    if not places[0] or any(each != places[0] for each in places):
        raise ValueError("its decoder's blocks are not all given what the encoder's last one returns")
    return places[0][0]


def _embedded(frame: nn.Module, first: BlockRecorder, given: dict[str, Any]) -> Tensor:
    """What the first block of a list is given."""
    first.stops = True
    try:
        frame(**given)
    except StoppedAtBlock as stopped:
        return stopped.hidden
    finally:
        first.stops = False
    raise ValueError("no block is called")


def noting(called: list[tuple[str, tuple[Any, ...]]], path: str) -> Callable[..., None]:
    """A hook that notes calls of the module at a path, and what it was given."""
    return lambda _, args, kwargs: called.append((path, (*args, *kwargs.values())))


def carried_by(
    recorders: Sequence[BlockRecorder], embedded: Tensor | None, given_as: str | int | None
) -> tuple[int, ...]:
    """Which of what a block returns besides hidden states the next one is given.

    All else must follow from places and masks alone, not from embeddings.
    """
    carried: set[int] = set()
    for index, recorder in enumerate(recorders):
        assert recorder.given is not None
        args, kwargs = recorder.given
        for key, value in [*enumerate(args), *kwargs.items()]:
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
