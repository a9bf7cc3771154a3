"""The layers of a decoder: embedding, blocks, head. Each holds its modules and calls them by the model's own code.

What goes from layer to layer is a dict: `hidden_states` [B, T, D], and what came with the tokens (`attention_mask`,
`position_ids`) for the blocks to come. In a mixture of experts that learns with a loss of its routers, what these
said goes along too, for the head to work the loss out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.huggingface.anatomy import Anatomy, DecoderError, blocks_of
from penstock.models.huggingface.frame import Arguments, Catcher, Stopped, hollow, stand_in
from penstock.models.huggingface.routers import ROUTED, Routers
from penstock.models.huggingface.shards import Shards
from penstock.runtime.tensor_parallel import Sharding

Value = dict[str, Any]
HIDDEN = "hidden_states"
IMAGES = "pixel_values"
"""What inputs for a tower for images begin with."""


class Piece(nn.Module):
    """One layer; its modules keep the names that they have in the model.

    Attributes:
        modules_at: path in the model -> module, those with weights first.
        shards: what of them may be sharded.
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
        """Shards its modules in place."""
        if self.shards is not None:
            self.shards.apply(self.modules_at, sharding)


class EmbeddingPiece(Piece):
    """Tokens[B, T], or a dict of `input_ids` and what goes with them, to what the first block takes."""

    _frame: nn.Module

    def __init__(self, modules: Mapping[str, nn.Module], frame: nn.Module) -> None:
        super().__init__(modules)
        self.__dict__["_frame"] = frame

    def forward(self, given: Tensor | Value) -> Value:
        value = {"input_ids": given} if isinstance(given, Tensor) else dict(given)
        if "labels" in value:
            raise DecoderError(
                "labels are among the inputs; take them apart with inputs, targets = inputs_and_targets(batch) and "
                "call pipe.step(inputs, targets)"
            )
        if "input_ids" not in value:
            raise DecoderError(f"the inputs are {', '.join(value) or 'none'}; input_ids must be among them")
        tokens = value.pop("input_ids")
        try:
            self._frame(input_ids=tokens, use_cache=False, **value)
        except Stopped as stopped:
            return {HIDDEN: stopped.hidden, **{name: v for name, v in value.items() if not name.startswith(IMAGES)}}
        raise DecoderError("the model ran without calling its blocks")


class BlockPiece(Piece):
    """One block. `around` says what it is given besides the hidden states."""

    def __init__(
        self, path: str, block: nn.Module, index: int, around: Around, routers: Routers | None = None
    ) -> None:
        super().__init__({path: block})
        self._index = index
        self._around = around
        self._heard = None if routers is None else routers.listen(block)

    def forward(self, value: Value) -> Value:
        args, kwargs = self._around.arguments(self._index, value[HIDDEN], _beside(value))
        if self._heard is not None:
            self._heard.taken()  # by a block that is run again in a backward
        out = self.first(value[HIDDEN], *args, **kwargs)
        new = {**value, HIDDEN: out[0] if isinstance(out, tuple) else out}
        if self._heard is not None:
            new[ROUTED] = (*value.get(ROUTED, ()), *self._heard.taken())
        return new


class HeadPiece(Piece):
    """The final norm, the head and whatever the model does to logits: to logits[B, T, V], with a loss of routers to a
    dict of both.
    """

    _frame: nn.Module
    _entrance: Catcher

    def __init__(
        self, modules: Mapping[str, nn.Module], frame: nn.Module, entrance: Catcher, routers: Routers | None = None
    ) -> None:
        super().__init__(modules)
        self.__dict__["_frame"] = frame
        self.__dict__["_entrance"] = entrance
        self._routers = routers
        self._router_output = None if routers is None else routers.returned_by(frame)

    def forward(self, value: Value) -> Tensor | dict[str, Tensor]:
        self._entrance.instead = value[HIDDEN]
        if self._router_output is not None:
            self._router_output.logits = value.get(ROUTED, ())
        try:
            out = self._frame(inputs_embeds=_blank(value[HIDDEN]), use_cache=False, **_beside(value))
        finally:
            self._entrance.instead = None
            if self._router_output is not None:
                self._router_output.logits = ()
        logits: Tensor = out.logits
        return logits if self._routers is None else {"logits": logits, "router_loss": self._routers.loss(out)}


class Around:
    """What the blocks of a stage are given: worked out once a microbatch, where it is used."""

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        self._catchers = _catchers(model, anatomy)
        self._catchers[-1].stops = True
        fill = _stand_ins(model, anatomy)
        # Dropout of the embedding must not draw here: its numbers would be missing in the blocks.
        self._loose = {path: _without_dropout(model.get_submodule(path)) for path in anatomy.loose}
        self._frame = hollow(model, {**fill, **self._loose, anatomy.blocks: nn.ModuleList(self._catchers)})
        self._known: tuple[list[Any], list[Arguments]] | None = None

    def arguments(self, index: int, hidden: Tensor, rest: Value) -> Arguments:
        changes = [each._version for each in rest.values() if isinstance(each, Tensor) and not each.is_inference()]
        key = [hidden.shape, hidden.dtype, hidden.device, *changes, *rest, *rest.values()]
        if self._known is None or not _same(self._known[0], key):
            self._known = key, self._work_out(hidden, rest)
        return self._known[1][index]

    def _work_out(self, hidden: Tensor, rest: Value) -> list[Arguments]:
        for module in self._loose.values():
            if any(buffer.device != hidden.device for buffer in module.buffers()):
                module.to(hidden.device)
        try:
            with torch.no_grad():
                self._frame(inputs_embeds=_blank(hidden), use_cache=False, **rest)
        except Stopped:
            pass
        return [catcher.given for catcher in self._catchers if catcher.given is not None]


def build_pieces(
    model: nn.Module,
    anatomy: Anatomy,
    indices: Sequence[int],
    weights: Mapping[str, nn.Module],
    routers: Routers | None = None,
) -> list[Piece]:
    """The layers at `indices`; `weights` has the modules with weights that they need, by path."""
    loose = {path: copy.deepcopy(model.get_submodule(path)) for path in anatomy.loose}
    hollow_parts = _stand_ins(model, anatomy)
    around = Around(model, anatomy)
    pieces: list[Piece] = []
    for index in indices:
        if 0 < index <= anatomy.num_blocks:
            path = f"{anatomy.blocks}.{index - 1}"
            pieces.append(BlockPiece(path, weights[path], index - 1, around, routers))
            continue
        own = {path: weights[path] for path in (anatomy.before if index == 0 else anatomy.after)}
        catchers = _catchers(model, anatomy)
        frame = hollow(model, {**hollow_parts, **own, **loose, anatomy.blocks: nn.ModuleList(catchers)})
        if index == 0:
            catchers[0].stops = True
            pieces.append(EmbeddingPiece({**own, **loose}, frame))
        else:
            pieces.append(HeadPiece({**own, **loose}, frame, catchers[0], routers))
    return pieces


def _beside(value: Value) -> Value:
    """What goes along beside what layers make."""
    return {name: each for name, each in value.items() if name not in (HIDDEN, ROUTED)}


def _stand_ins(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Module]:
    # Whole numbers, which leave the type of the hidden states that they are added to as it is.
    paths = (*anatomy.before, *anatomy.after)
    return {path: stand_in(model.get_submodule(path), torch.int8) for path in paths}


def _catchers(model: nn.Module, anatomy: Anatomy) -> list[Catcher]:
    return [Catcher(block, anatomy.returns_tuple) for block in blocks_of(model, anatomy.blocks)]


def _without_dropout(module: nn.Module) -> nn.Module:
    return nn.Identity() if isinstance(module, nn.Dropout) else copy.deepcopy(module).eval()


def _blank(hidden: Tensor) -> Tensor:
    """Hidden states of the right shape, type and device, for code that looks at nothing else of them."""
    return hidden.detach().new_zeros(1).expand(hidden.shape)


def _same(known: Sequence[Any], key: Sequence[Any]) -> bool:
    return len(known) == len(key) and all(
        a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b for a, b in zip(known, key, strict=True)
    )


def place_at(root: nn.Module, path: str, module: nn.Module) -> None:
    """Puts a module at a path, under folders that hold nothing else."""
    *folders, last = path.split(".")
    for folder in folders:
        if folder not in root._modules:
            root.add_module(folder, nn.Module())
        root = root.get_submodule(folder)
    root.add_module(last, module)
