"""The layers of a model: embedding, blocks, head. Each holds its modules and calls them by the model's own code.

A dict travels from layer to layer. It has `hidden_states` [B, T, D], and the inputs that the next blocks need
(`attention_mask`, `position_ids`). If a mixture of experts learns with a loss of its routers, the router logits
travel too. After an encoder its output travels as well, for every block of the decoder, and so does what a block
returns for the next one, such as the position biases of T5.

    embedding --> encoder's blocks --> bridge --> decoder's blocks --> head
              hidden, carried                hidden, encoded, carried

A tower for images is a part of the embedding layer, where the pictures' features take the places of some tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.huggingface.anatomy import Anatomy, DecoderError, blocks_of
from penstock.models.huggingface.frame import (
    Arguments,
    BlockRecorder,
    HiddenStatesStandIn,
    StoppedAtBlock,
    encoded,
    hollow,
    set_mode,
    stand_in,
    uncached,
)
from penstock.models.huggingface.pictures import IMAGES, PictureForm
from penstock.models.huggingface.routers import ROUTED, RouterOutput, Routers
from penstock.models.huggingface.shards import Shards
from penstock.runtime.stage.stage import place_at
from penstock.runtime.tensor_parallel import Sharding

Value = dict[str, Any]
HIDDEN = "hidden_states"
ENCODED = "encoded_states"
"""The encoder's output, for the decoder's blocks."""
CARRIED = "carried"
"""The values besides hidden states that a block returned for the next one."""
TOKENS, TARGETS = "input_ids", "decoder_input_ids"


class ModelLayer(nn.Module):
    """One layer, whose modules keep the names that they have in the model.

    Attributes:
        modules_at: the layer's modules by path in the model, those with weights first.
        shards: says which of them ranks may share.
    """

    modules_at: dict[str, nn.Module]
    shards: Shards | None = None

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.__dict__["modules_at"] = dict(modules)
        for path, module in modules.items():
            place_at(self, path, module)

    @property
    def first(self) -> nn.Module:
        """The module that stands for the layer in a stage."""
        return next(iter(self.modules_at.values()))

    def shard_over(self, sharding: Sharding) -> None:
        """Shards the layer's modules in place."""
        if self.shards is not None:
            self.shards.apply(self.modules_at, sharding)


class BlockLayer(ModelLayer):
    """One block. `block_arguments` gives its arguments besides the hidden states."""

    def __init__(
        self, path: str, block: nn.Module, index: int, block_arguments: BlockArguments, routers: Routers | None = None
    ) -> None:
        super().__init__({path: block})
        self._index = index
        self._block_arguments = block_arguments
        self._heard = None if routers is None else routers.listen(block)

    def forward(self, value: Value) -> Value:
        args, kwargs = self._block_arguments.arguments(self._index, value)
        if self._heard is not None:
            self._heard.taken()  # by a block that is run again in a backward
        out = self.first(value[HIDDEN], *args, **kwargs)
        new = {**value, HIDDEN: out[0] if isinstance(out, tuple) else out}
        if self._heard is not None:
            new[ROUTED] = (*value.get(ROUTED, ()), *self._heard.taken())
        if self._block_arguments.carried:
            new[CARRIED] = tuple(out[number] for number in self._block_arguments.carried)
        if self._index == self._block_arguments.num_blocks - 1:
            new.pop(CARRIED, None)
            new.pop(ENCODED, None)
        return new


class LayerAround(ModelLayer):
    """A layer before, between or after the stacks of blocks. It runs the model's own code from one stack to the next.

    Args:
        frame: the model with the layer's modules, and stand-ins for all others.
        entrance: the stand-in that gives on the hidden states of the stack before the layer; None before the first.
        way_out: the stand-in for the first block of the next stack, at which the code stops; None after the last.
    """

    _anatomy: Anatomy
    _frame: nn.Module
    _entrance: BlockRecorder | None
    _way_out: BlockRecorder | None

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        anatomy: Anatomy,
        frame: nn.Module,
        entrance: BlockRecorder | None,
        way_out: BlockRecorder | None,
    ) -> None:
        super().__init__(modules)
        self.__dict__.update(_frame=frame, _entrance=entrance, _way_out=way_out, _anatomy=anatomy)
        if way_out is not None:
            way_out.stops = True

    def _run(self, given: Value, hidden: Tensor | None = None) -> Any:
        """Calls the model's code in the mode of the layer's modules.

        Args:
            given: the arguments of the model.
            hidden: the hidden states of the stack before the layer.

        Returns:
            The hidden states for the next stack, or the model's output in the last layer.
        """
        set_mode(self._frame, any(module.training for module in self.modules_at.values()))
        if self._entrance is not None:
            self._entrance.instead = hidden
        try:
            out = self._frame(**given, **uncached(self._frame))
        except StoppedAtBlock as stopped:
            return stopped.hidden
        finally:
            if self._entrance is not None:
                self._entrance.instead = None
        if self._way_out is not None:
            raise DecoderError("the model ran without calling its blocks")
        return out


class EmbeddingLayer(LayerAround):
    """Turns tokens[B, T], or a dict of `input_ids` and other inputs, into the input of the first block."""

    pictures: PictureForm | None = None

    def forward(self, given: Tensor | Value) -> Value:
        value = self._checked(given)
        embedded = self._run({name: v for name, v in value.items() if name not in self._anatomy.labels})
        left_out = () if self._anatomy.keeps_inputs else (TOKENS,)
        beside = {name: v for name, v in value.items() if name not in left_out and not name.startswith(IMAGES)}
        if self._frame.main_input_name == IMAGES:  # the code behind the patches looks only at their type and number
            beside[IMAGES] = value[IMAGES][:, :1, :1, :1]
        return {HIDDEN: embedded, **beside}

    def _checked(self, given: Tensor | Value) -> Value:
        """The inputs by name. Raises DecoderError for inputs that do not fit the model."""
        main = str(self._frame.main_input_name)
        given = {main: given} if isinstance(given, Tensor) else given
        value = {name: each for name, each in given.items() if each is not None}
        if "labels" in value and not self._anatomy.labels:
            raise DecoderError(
                "labels are among the inputs; take them apart with inputs, targets = inputs_and_targets(batch) and "
                "call pipe.step(inputs, targets)"
            )
        if main not in value:
            raise DecoderError(f"the inputs are {', '.join(value) or 'none'}; {main} must be among them")
        if main == IMAGES:
            return value
        if self._anatomy.encoder is not None and TARGETS not in value:
            raise DecoderError(
                f"the inputs are {', '.join(value)}; a model with an encoder needs {TARGETS} too, "
                "which decoder.inputs_and_targets(batch) makes of the labels"
            )
        if self.pictures is not None:
            self.pictures.check(value[TOKENS], value.get(IMAGES))
        elif IMAGES in value:
            raise DecoderError(
                f"{IMAGES} are among the inputs, and the model takes none, or pictures of no one size; it was "
                "compared with the whole model on text alone, so give text alone"
            )
        return value


class BridgeLayer(LayerAround):
    """The layer between an encoder's blocks and the decoder's: the norm of the one, the embedding of the other."""

    def forward(self, value: Value) -> Value:
        rest = _beside(value)
        given = {name: each for name, each in rest.items() if name not in self._anatomy.labels}
        hidden = self._run({"inputs_embeds": _blank(value[HIDDEN]), **given}, value[HIDDEN])
        assert self._way_out is not None
        made = dict(self._way_out.arguments)[self._anatomy.given_as]
        self._way_out.given = None
        del rest[TARGETS]
        return {HIDDEN: hidden, ENCODED: made, **rest}


class HeadLayer(LayerAround):
    """The final norm, the head and the model's own changes of logits.

    Returns logits[B, T, V]; with a loss of routers a dict of both; with labels a dict of the values that the model's
    own forward returns for them.
    """

    _routers: Routers | None = None
    _router_output: RouterOutput | None = None

    def add_router_loss(self, routers: Routers) -> None:
        """From now on the layer returns the loss of these routers too."""
        self._routers, self._router_output = routers, routers.returned_by(self._frame)

    def forward(self, value: Value) -> Tensor | dict[str, Tensor]:
        if self._router_output is not None:
            self._router_output.logits = value.get(ROUTED, ())
        rest = _beside(value)
        mask = rest.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 4:
            del rest["attention_mask"]  # of attention alone; a loss of routers looks for samples that are padded
        out = self._run({**_in_place_of_embeddings(value, self._anatomy, self._frame), **rest}, value[HIDDEN])
        if self._router_output is not None:
            self._router_output.logits = ()
        if self._anatomy.labels:
            is_kept = {name: isinstance(v, Tensor) and not name.startswith("encoder_") for name, v in out.items()}
            return {name: v for name, v in out.items() if is_kept[name]}
        logits: Tensor = out.logits
        return logits if self._routers is None else {"logits": logits, "router_loss": self._routers.loss(out)}


class BlockArguments:
    """The arguments of the blocks of one stack, worked out once per microbatch and stage, by the model's own code.

    Args:
        number: of the stack.

    Attributes:
        carried: see `BlockStack`.
        num_blocks: the number of blocks in the stack.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, number: int) -> None:
        lists = _recorders(model, anatomy)
        self._is_encoder = number < len(lists) - 1
        self._recorders = lists[number]
        self._recorders[-1].stops = True
        self.num_blocks, self.carried = len(self._recorders), anatomy.stacks[number].carried
        self._anatomy = anatomy
        # Dropout of the embedding must not draw here: its numbers would be missing in the blocks.
        self._loose = {path: _without_dropout(model.get_submodule(path)) for path in anatomy.loose}
        self._frame = hollow(model, {**_stand_ins(model, anatomy), **self._loose, **_as_modules(anatomy, lists)})
        self._known: tuple[list[Any], list[Arguments], Tensor | None] | None = None

    def arguments(self, index: int, value: Value) -> Arguments:
        """The arguments of a block besides the hidden states, for the value that comes to it."""
        hidden, rest, made = value[HIDDEN], _beside(value), value.get(ENCODED)
        changes = [each._version for each in rest.values() if isinstance(each, Tensor) and not each.is_inference()]
        shapes = [(each.shape, each.dtype, each.device) for each in (hidden, made) if each is not None]
        key = [*shapes, *changes, *rest, *rest.values(), torch.is_inference_mode_enabled()]
        if self._known is None or not _same(self._known[0], key):
            self._known = key, *self._work_out(value)
        _, known, blank = self._known
        args, kwargs = known[index]
        carried = value.get(CARRIED, ())

        def actual(given: Any) -> Any:
            if given is blank and blank is not None:
                return made
            number = self._recorders[index - 1].number_of(given) if index and self.carried else None
            return given if number is None else carried[self.carried.index(number)]

        return tuple(actual(each) for each in args), {name: actual(each) for name, each in kwargs.items()}

    def _work_out(self, value: Value) -> tuple[list[Arguments], Tensor | None]:
        hidden = value[HIDDEN]
        for module in self._loose.values():
            if any(buffer.device != hidden.device for buffer in module.buffers()):
                module.to(hidden.device)
        instead = _in_place_of_embeddings(value, self._anatomy, self._frame, self._is_encoder)
        rest = {name: each for name, each in _beside(value).items() if name not in self._anatomy.labels}
        try:
            with torch.no_grad():
                self._frame(**instead, **uncached(self._frame), **rest)
        except StoppedAtBlock:
            pass
        blank = instead["encoder_outputs"][0] if "encoder_outputs" in instead else None
        return [recorder.given for recorder in self._recorders if recorder.given is not None], blank


def build_layers(
    model: nn.Module,
    anatomy: Anatomy,
    indices: Sequence[int],
    weights: Mapping[str, nn.Module],
    routers: Routers | None = None,
    pictures: PictureForm | None = None,
) -> list[ModelLayer]:
    """The layers at `indices`.

    Args:
        weights: the modules with weights of these layers, by path.
        pictures: the form of the pictures that a model takes.
    """
    loose = {path: copy.deepcopy(model.get_submodule(path)) for path in anatomy.loose}
    hollow_parts = _stand_ins(model, anatomy)
    block_arguments = [BlockArguments(model, anatomy, number) for number in range(len(anatomy.stacks))]
    layers: list[ModelLayer] = []
    for index in indices:
        paths = anatomy.paths(index)
        own = {path: weights[path] for path in paths}
        number, block = anatomy.place(index)
        if block >= 0:
            heard = routers if number == len(anatomy.stacks) - 1 else None
            layers.append(BlockLayer(paths[0], own[paths[0]], block, block_arguments[number], heard))
            continue
        lists = _recorders(model, anatomy)
        frame = hollow(model, {**hollow_parts, **own, **loose, **_as_modules(anatomy, lists)})
        entrance = lists[number - 1][0] if number else None
        way_out = lists[number][0] if number < len(lists) else None
        kind = EmbeddingLayer if entrance is None else HeadLayer if way_out is None else BridgeLayer
        layer = kind({**own, **loose}, anatomy, frame, entrance, way_out)
        if isinstance(layer, EmbeddingLayer):
            layer.pictures = pictures
        elif isinstance(layer, HeadLayer) and routers is not None:
            layer.add_router_loss(routers)
        layers.append(layer)
    return layers


def model_layers(
    model: nn.Module, anatomy: Anatomy, routers: Routers | None = None, pictures: PictureForm | None = None
) -> list[ModelLayer]:
    """All layers of a model. They share its weights."""
    everything = range(anatomy.num_layers)
    weights = {path: model.get_submodule(path) for index in everything for path in anatomy.paths(index)}
    return build_layers(model, anatomy, everything, weights, routers, pictures)


def _beside(value: Value) -> Value:
    """The entries of a value that layers do not make."""
    return {name: each for name, each in value.items() if name not in (HIDDEN, ROUTED, ENCODED, CARRIED)}


def _in_place_of_embeddings(
    value: Value, anatomy: Anatomy, frame: nn.Module, is_encoder: bool = False
) -> dict[str, Any]:
    """Arguments with which the model's code embeds nothing, and in a decoder behind an encoder encodes nothing.

    If the inputs travel along, no such arguments are needed: the stand-ins for the embeddings return hidden states
    of the right form.
    """
    hidden = _blank(value[HIDDEN])
    if anatomy.keeps_inputs:
        for path in anatomy.before:
            frame.get_submodule(path).instead = hidden
        return {}
    if is_encoder or anatomy.encoder is None:
        return {"inputs_embeds": hidden}
    made, mask = value.get(ENCODED), value.get("attention_mask")
    if made is None:  # behind the decoder's blocks, where only masks ask for its length
        length = hidden.shape[1] if mask is None else mask.shape[-1]
        made = hidden[:, :1].expand(-1, length, -1)
    return {"encoder_outputs": encoded(_blank(made)), "decoder_inputs_embeds": hidden}


def _stand_ins(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Module]:
    # Whole numbers, which leave the type of the hidden states that they are added to as it is.
    paths = [*anatomy.after, *(path for stack in anatomy.stacks for path in stack.before)]
    fill = {path: stand_in(model.get_submodule(path), torch.int8) for path in paths}
    blank = anatomy.before if anatomy.keeps_inputs else ()
    return fill | {path: HiddenStatesStandIn(model.get_submodule(path)) for path in blank}


def _recorders(model: nn.Module, anatomy: Anatomy) -> list[list[BlockRecorder]]:
    """A recorder for each block of each stack."""
    return [
        [BlockRecorder(block, stack.num_returned) for block in blocks_of(model, stack.blocks)]
        for stack in anatomy.stacks
    ]


def _as_modules(anatomy: Anatomy, lists: Sequence[Sequence[BlockRecorder]]) -> dict[str, nn.Module]:
    return {path: nn.ModuleList(recorders) for path, recorders in zip(anatomy.lists, lists, strict=True)}


def _without_dropout(module: nn.Module) -> nn.Module:
    return nn.Identity() if isinstance(module, nn.Dropout) else copy.deepcopy(module).eval()


def _blank(hidden: Tensor) -> Tensor:
    """Hidden states of the right shape, type and device, for code that looks at nothing else of them."""
    return hidden.detach().new_zeros(1).expand(hidden.shape)


def _same(known: Sequence[Any], key: Sequence[Any]) -> bool:
    return len(known) == len(key) and all(
        a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b for a, b in zip(known, key, strict=True)
    )
