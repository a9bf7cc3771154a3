"""The layers of a model: embedding, blocks, head. Each holds its modules and calls them by the model's own code.

What goes from layer to layer is a dict: `hidden_states` [B, T, D], and what came with the tokens (`attention_mask`,
`position_ids`) for the blocks to come. In a mixture of experts that learns with a loss of its routers, what these
said goes along too, for the head to work the loss out. Behind an encoder goes along what it encoded, for every block
of the decoder, and what a block returns for the next one, like the biases of T5.

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
from penstock.models.huggingface.routers import ROUTED, Routers
from penstock.models.huggingface.shards import Shards
from penstock.runtime.stage.stage import place_at
from penstock.runtime.tensor_parallel import Sharding

Value = dict[str, Any]
HIDDEN = "hidden_states"
ENCODED = "encoded_states"
"""What the decoder's blocks are given of the encoder."""
CARRIED = "carried"
"""What a block returned for the next one besides hidden states."""
TOKENS, TARGETS = "input_ids", "decoder_input_ids"


class ModelLayer(nn.Module):
    """One layer; its modules keep the names that they have in the model.

    Attributes:
        modules_at: path in the model -> module, those with weights first.
        shards: what of them may be sharded.
    """

    modules_at: dict[str, nn.Module]
    shards: Shards | None = None
    _frame: nn.Module

    def __init__(self, modules: Mapping[str, nn.Module], frame: nn.Module | None = None) -> None:
        super().__init__()
        self.__dict__["_frame"] = frame
        self.__dict__["modules_at"] = dict(modules)
        for path, module in modules.items():
            place_at(self, path, module)

    @property
    def first(self) -> nn.Module:
        """The module that stands for the layer in a stage."""
        return next(iter(self.modules_at.values()))

    def _run(self, given: Value) -> Any:
        """Calls the model's own code around the layer's modules, in the mode that they are in."""
        set_mode(self._frame, any(module.training for module in self.modules_at.values()))
        return self._frame(**given, **uncached(self._frame))

    def shard_over(self, sharding: Sharding) -> None:
        """Shards its modules in place."""
        if self.shards is not None:
            self.shards.apply(self.modules_at, sharding)


class EmbeddingLayer(ModelLayer):
    """Tokens[B, T], or a dict of `input_ids` and what goes with them, to what the first block takes."""

    def __init__(
        self, modules: Mapping[str, nn.Module], frame: Any, anatomy: Anatomy, pictures: PictureForm | None = None
    ) -> None:
        super().__init__(modules, frame)
        self._main_input = frame.main_input_name
        self._anatomy = anatomy
        self._pictures = pictures

    def forward(self, given: Tensor | Value) -> Value:
        value = self._checked(given)
        embedded = self._embedded({name: v for name, v in value.items() if name not in self._anatomy.labels})
        left_out = () if self._anatomy.keeps_inputs else (TOKENS,)
        beside = {name: v for name, v in value.items() if name not in left_out and not name.startswith(IMAGES)}
        if self._main_input == IMAGES:  # of which code behind the patches looks at nothing
            beside[IMAGES] = value[IMAGES][:, :1, :1, :1]
        return {HIDDEN: embedded, **beside}

    def _embedded(self, value: Value) -> Tensor:
        try:
            self._run(value)
        except StoppedAtBlock as stopped:
            return stopped.hidden
        raise DecoderError("the model ran without calling its blocks")

    def _checked(self, given: Tensor | Value) -> Value:
        """With the tokens by name. Raises DecoderError for what does not fit the model."""
        given = {self._main_input: given} if isinstance(given, Tensor) else given
        value = {name: each for name, each in given.items() if each is not None}
        if "labels" in value and not self._anatomy.labels:
            raise DecoderError(
                "labels are among the inputs; take them apart with inputs, targets = inputs_and_targets(batch) and "
                "call pipe.step(inputs, targets)"
            )
        if self._main_input not in value:
            raise DecoderError(f"the inputs are {', '.join(value) or 'none'}; {self._main_input} must be among them")
        if self._main_input == IMAGES:
            return value
        if self._anatomy.encoder is not None and TARGETS not in value:
            raise DecoderError(
                f"the inputs are {', '.join(value)}; a model with an encoder needs {TARGETS} too, "
                "which decoder.inputs_and_targets(batch) makes of the labels"
            )
        if self._pictures is None and IMAGES in value:
            raise DecoderError(
                f"{IMAGES} are among the inputs, and the model takes none, or pictures of no one size; it was "
                "compared with the whole model on text alone, so give text alone"
            )
        if self._pictures is not None:
            self._pictures.check(value[TOKENS], value.get(IMAGES))
        return value


class BlockLayer(ModelLayer):
    """One block. `block_arguments` says what it is given besides the hidden states."""

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


class BridgeLayer(ModelLayer):
    """What stands between an encoder's blocks and the decoder's: the norm of the one, the embedding of the other."""

    _entrance: BlockRecorder
    _exit: BlockRecorder

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        frame: nn.Module,
        entrance: BlockRecorder,
        way_out: BlockRecorder,
        anatomy: Anatomy,
    ) -> None:
        super().__init__(modules, frame)
        self.__dict__["_entrance"] = entrance
        self.__dict__["_exit"] = way_out
        assert anatomy.encoder is not None
        self._given_as = anatomy.encoder.given_as
        self._labels = anatomy.labels

    def forward(self, value: Value) -> Value:
        self._entrance.instead = value[HIDDEN]
        rest = _beside(value)
        given = {name: each for name, each in rest.items() if name not in self._labels}
        try:
            self._run({"inputs_embeds": _blank(value[HIDDEN]), **given})
        except StoppedAtBlock as stopped:
            assert self._exit.given is not None
            args, kwargs = self._exit.given
            made = args[self._given_as] if isinstance(self._given_as, int) else kwargs[self._given_as]
            del rest[TARGETS]
            return {HIDDEN: stopped.hidden, ENCODED: made, **rest}
        finally:
            self._entrance.instead = self._exit.given = None
        raise DecoderError("the model ran without calling its decoder's blocks")


class HeadLayer(ModelLayer):
    """The final norm, the head and whatever the model does to logits: to logits[B, T, V], with a loss of routers to a
    dict of both; with labels to a dict of what the model's own forward returns for them.
    """

    _entrance: BlockRecorder

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        frame: nn.Module,
        entrance: BlockRecorder,
        anatomy: Anatomy,
        routers: Routers | None = None,
    ) -> None:
        super().__init__(modules, frame)
        self.__dict__["_entrance"] = entrance
        self._routers = routers
        self._anatomy = anatomy
        self._router_output = None if routers is None else routers.returned_by(frame)

    def forward(self, value: Value) -> Tensor | dict[str, Tensor]:
        self._entrance.instead = value[HIDDEN]
        if self._router_output is not None:
            self._router_output.logits = value.get(ROUTED, ())
        rest = _beside(value)
        mask = rest.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 4:
            del rest["attention_mask"]  # of attention alone; a loss of routers looks for samples that are padded
        try:
            out = self._run({**_in_place_of_embeddings(value, self._anatomy, self._frame), **rest})
        finally:
            self._entrance.instead = None
            if self._router_output is not None:
                self._router_output.logits = ()
        if self._anatomy.labels:
            is_kept = {name: isinstance(v, Tensor) and not name.startswith("encoder_") for name, v in out.items()}
            return {name: v for name, v in out.items() if is_kept[name]}
        logits: Tensor = out.logits
        return logits if self._routers is None else {"logits": logits, "router_loss": self._routers.loss(out)}


class BlockArguments:
    """What the blocks of one list are given in a stage: worked out once a microbatch, where it is used.

    Args:
        is_encoder: of the encoder's blocks, not of the decoder's.

    Attributes:
        carried: see `Anatomy`. num_blocks: blocks of the list.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, is_encoder: bool = False) -> None:
        lists, fill = _recorders(model, anatomy), _stand_ins(model, anatomy)
        self._is_encoder = is_encoder
        path = anatomy.encoder.blocks if is_encoder and anatomy.encoder is not None else anatomy.blocks
        self._recorders = lists[path]
        self.num_blocks = len(self._recorders)
        self._recorders[-1].stops = True
        self.carried = anatomy.encoder.carried if is_encoder and anatomy.encoder is not None else anatomy.carried
        self._anatomy = anatomy
        # Dropout of the embedding must not draw here: its numbers would be missing in the blocks.
        self._loose = {path: _without_dropout(model.get_submodule(path)) for path in anatomy.loose}
        self._frame = hollow(model, {**fill, **self._loose, **_as_modules(lists)})
        self._known: tuple[list[Any], list[Arguments], Tensor | None] | None = None

    def arguments(self, index: int, value: Value) -> Arguments:
        """Of a block, by the value that comes to it."""
        hidden, rest, made = value[HIDDEN], _beside(value), value.get(ENCODED)
        changes = [each._version for each in rest.values() if isinstance(each, Tensor) and not each.is_inference()]
        shapes = [(each.shape, each.dtype, each.device) for each in (hidden, made) if each is not None]
        key = [*shapes, *changes, *rest, *rest.values()]
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
    """The layers at `indices`; `weights` has the modules with weights that they need, by path, and `pictures` says
    what a model that sees is given.
    """
    loose = {path: copy.deepcopy(model.get_submodule(path)) for path in anatomy.loose}
    hollow_parts = _stand_ins(model, anatomy)
    encoder = anatomy.encoder
    block_arguments = {
        is_encoder: BlockArguments(model, anatomy, is_encoder) for is_encoder in (False, True)[: 1 + bool(encoder)]
    }
    layers: list[ModelLayer] = []
    for index in indices:
        paths = anatomy.paths(index)
        own = {path: weights[path] for path in paths}
        number = index - anatomy.first_block
        if 0 <= number < anatomy.num_blocks:
            layers.append(BlockLayer(paths[0], own[paths[0]], number, block_arguments[False], routers))
            continue
        if encoder is not None and 0 < index <= encoder.num_blocks:
            layers.append(BlockLayer(paths[0], own[paths[0]], index - 1, block_arguments[True]))
            continue
        lists = _recorders(model, anatomy)
        frame = hollow(model, {**hollow_parts, **own, **loose, **_as_modules(lists)})
        first = lists[anatomy.blocks][0]
        if number == anatomy.num_blocks:
            layers.append(HeadLayer({**own, **loose}, frame, first, anatomy, routers))
        elif encoder is not None and index > 0:
            first.stops = True
            layers.append(BridgeLayer({**own, **loose}, frame, lists[encoder.blocks][0], first, anatomy))
        else:
            next(iter(lists.values()))[0].stops = True
            layers.append(EmbeddingLayer({**own, **loose}, frame, anatomy, pictures))
    return layers


def model_layers(
    model: nn.Module, anatomy: Anatomy, routers: Routers | None = None, pictures: PictureForm | None = None
) -> list[ModelLayer]:
    """All layers of a model that is there, which share its weights."""
    everything = range(anatomy.num_layers)
    weights = {path: model.get_submodule(path) for index in everything for path in anatomy.paths(index)}
    return build_layers(model, anatomy, everything, weights, routers, pictures)


def _beside(value: Value) -> Value:
    """What goes along beside what layers make."""
    return {name: each for name, each in value.items() if name not in (HIDDEN, ROUTED, ENCODED, CARRIED)}


def _in_place_of_embeddings(
    value: Value, anatomy: Anatomy, frame: nn.Module, is_encoder: bool = False
) -> dict[str, Any]:
    """Arguments of the model by which its code embeds nothing, and encodes nothing where it is behind an encoder.

    Where the inputs are there, none are needed: what stands for the embeddings returns what has their form.
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
    paths = [*anatomy.before, *anatomy.after, *(() if anatomy.encoder is None else anatomy.encoder.before)]
    fill = {path: stand_in(model.get_submodule(path), torch.int8) for path in paths}
    blank = anatomy.before if anatomy.keeps_inputs else ()
    return fill | {path: HiddenStatesStandIn(model.get_submodule(path)) for path in blank}


def _recorders(model: nn.Module, anatomy: Anatomy) -> dict[str, list[BlockRecorder]]:
    """By the path of each list of blocks, in order."""
    lists = {anatomy.blocks: anatomy.num_returned}
    if anatomy.encoder is not None:
        lists = {anatomy.encoder.blocks: anatomy.encoder.num_returned, **lists}
    return {path: [BlockRecorder(block, num) for block in blocks_of(model, path)] for path, num in lists.items()}


def _as_modules(lists: Mapping[str, list[BlockRecorder]]) -> dict[str, nn.Module]:
    return {path: nn.ModuleList(recorders) for path, recorders in lists.items()}


def _without_dropout(module: nn.Module) -> nn.Module:
    return nn.Identity() if isinstance(module, nn.Dropout) else copy.deepcopy(module).eval()


def _blank(hidden: Tensor) -> Tensor:
    """Hidden states of the right shape, type and device, for code that looks at nothing else of them."""
    return hidden.detach().new_zeros(1).expand(hidden.shape)


def _same(known: Sequence[Any], key: Sequence[Any]) -> bool:
    return len(known) == len(key) and all(
        a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b for a, b in zip(known, key, strict=True)
    )
