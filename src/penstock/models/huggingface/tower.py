"""A tower for images, cut block by block as an encoder is.

    layer    0                   1 .. t         t + 1
             patches, places,    its blocks     its norm, the projector, the embedding of tokens
             the norm before

What comes before the blocks is found by running the model's own code on the meta device, with a picture of the right
shape and stand-ins for the blocks. Gradients by what stand-ins return tell which blocks' hidden states the features
are made of: the last one's, those of the last but one, or several. A tower that does not fit stays a part of the
first layer, and `Anatomy.uncut` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.huggingface.anatomy import (
    MOST_RETURNED,
    Anatomy,
    DecoderError,
    ImageTower,
    blocks_of,
    carried_by,
    modules_around,
    noting,
)
from penstock.models.huggingface.frame import Arguments, BlockRecorder, StoppedAtBlock, hollow, on_meta
from penstock.models.huggingface.layers import HIDDEN, TOKENS, BlockArguments
from penstock.models.huggingface.pictures import PictureForm, picture_form

__all__ = ["cut_tower"]


def cut_tower(model: Any, anatomy: Anatomy) -> Anatomy:
    """The anatomy with the blocks of a tower for images as layers, where the model has one that can be cut."""
    if anatomy.encoder is not None:
        return anatomy
    try:
        form = picture_form(model)
    except DecoderError as error:
        return replace(anatomy, uncut=str(error))
    if form is None:
        return anatomy
    reasons = []
    try:
        path = _list_in_tower(model, anatomy)
        parts, loose, buffers = modules_around(model, [path, anatomy.blocks], type(model).__name__)
    except DecoderError as error:
        return replace(anatomy, uncut=str(error))
    for num_returned in range(MOST_RETURNED + 1):
        try:
            tower, given = _traced(model, anatomy, path, parts, num_returned, form)
            before = [part for part in parts if part not in (*tower.before, *anatomy.after)]
            cut = replace(anatomy, before=tuple(before), loose=tuple(loose), buffers=tuple(buffers), encoder=tower)
            _require_same(given, _given_over_stand_ins(model, cut, tower))
            return cut
        except Exception as error:  # whatever the model's code raises over stand-ins, its tower does not fit
            reasons.append(f"{type(error).__name__}: {error}")
    return replace(anatomy, uncut=f"its code around {path!r} does not run apart from it ({reasons[0]})")


def _list_in_tower(model: nn.Module, anatomy: Anatomy) -> str:
    """The path of the one list of blocks outside the decoder's."""
    inside = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
        if not f"{path}.".startswith(f"{anatomy.blocks}.")
    ]
    outer = [path for path in inside if not any(path.startswith(f"{other}.") for other in inside)]
    if len(outer) != 1:
        found = ", ".join(outer) or "none"
        raise DecoderError(f"looked for one list of blocks in its tower for images and found {len(outer)}: {found}")
    return outer[0]


def _traced(
    model: Any, anatomy: Anatomy, path: str, parts: list[str], num_returned: int, form: PictureForm
) -> tuple[ImageTower, list[Arguments]]:
    """The tower, and what its blocks were given. Raises ValueError where it does not fit, and what the code does."""
    shadow = on_meta(model)
    recorders = [BlockRecorder(block, num_returned) for block in blocks_of(shadow, path)]
    frame: Any = hollow(shadow, {path: nn.ModuleList(recorders)})
    picture = torch.zeros(1, form.num_channels, form.size, form.size, device="meta")
    recorders[0].stops = True
    try:
        frame.get_image_features(pixel_values=picture)
        raise ValueError("its blocks are not called")
    except StoppedAtBlock as stopped:
        embedded = stopped.hidden
    recorders[0].stops = False
    for recorder in recorders:
        recorder.instead = torch.zeros_like(embedded).detach().requires_grad_()
    called: list[tuple[str, tuple[Any, ...]]] = []
    names = {f"{path}.{index}": recorder for index, recorder in enumerate(recorders)}
    for name, module in {**names, **{part: frame.get_submodule(part) for part in parts}}.items():
        module.register_forward_pre_hook(noting(called, name), with_kwargs=True)
    found = frame.get_image_features(pixel_values=picture)
    order = [name for name, _ in called]
    if [name for name in order if name in names] != list(names):
        raise ValueError("its blocks are not called once each and in order")
    inputs = [given for name, given in called if name in names]
    for recorder, given in zip(recorders, inputs[1:], strict=False):
        if not any(value is recorder.instead for value in given):
            raise ValueError("what a block returns is not what the next one is given")
    before = list(dict.fromkeys(order[: order.index(next(iter(names)))]))
    if twice := [part for part in before if part in order[order.index(next(iter(names))) :]]:
        raise ValueError(f"{twice[0]} is called before the blocks and after them")
    earlier = [p for part in before for p in shadow.get_submodule(part).parameters() if p.requires_grad]
    selected = _features_follow_from([c.instead for c in recorders if c.instead is not None], earlier, found)
    kept = [recorder.given for recorder in recorders if recorder.given is not None]
    tower = ImageTower(
        path,
        len(recorders),
        tuple(before),
        num_returned,
        carried_by(recorders, embedded, None),
        form=form,
        whole=anatomy,
        selected=selected,
        num_positions=embedded.shape[-2],
        width=embedded.shape[-1],
    )
    return tower, kept[: tower.num_called]


def _features_follow_from(states: list[Tensor], earlier: list[Tensor], found: Any) -> tuple[int, ...]:
    """Which blocks' hidden states. Raises ValueError where there are none, or where it is not blocks alone."""
    total = torch.zeros((), device="meta")
    for feature in _tensors_in(getattr(found, "pooler_output", found)):
        total = total + feature.sum()
    gradients = torch.autograd.grad(total, [*states, *earlier], allow_unused=True)
    if any(gradient is not None for gradient in gradients[len(states) :]):
        raise ValueError("its features follow from what comes before the blocks, and not from blocks alone")
    selected = tuple(number for number, gradient in enumerate(gradients[: len(states)]) if gradient is not None)
    if not selected:
        raise ValueError("its features follow from no block")
    return selected


def _tensors_in(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        yield from _tensors_in(list(found.values()))
    elif isinstance(found, Iterable):
        for each in found:
            yield from _tensors_in(each)


def _given_over_stand_ins(model: Any, anatomy: Anatomy, tower: ImageTower) -> list[Arguments]:
    """What a tower's blocks are given where nothing of the model is there."""
    block_arguments = BlockArguments(model, anatomy, True)
    value = {
        TOKENS: torch.full((1, tower.form.num_tokens), tower.form.token),
        HIDDEN: torch.zeros(1, tower.num_positions, tower.width),
    }
    return [block_arguments.arguments(index, value) for index in range(tower.num_called)]


def _require_same(wanted: list[Arguments], found: list[Arguments]) -> None:
    """Raises ValueError where blocks are given tensors of other shapes."""
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        shapes = [
            {key: (value.shape, value.dtype) for key, value in each if isinstance(value, Tensor)}
            for each in ([*enumerate(args), *kwargs.items()] for args, kwargs in (one, other))
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(f"block {number} is given {shapes[1]} without weights, and {shapes[0]} with them")
