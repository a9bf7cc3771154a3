"""Compares an architecture as a whole with its stages, on a small copy of its config.

The copy is trained twice for a step of two microbatches: as a whole, with the model's own loss, and cut into stages.
Each stage sees only the output of the one before. The loss and all gradients must be equal to the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.models.huggingface.anatomy import BY_STAGES, Anatomy, DecoderError, has_encoder
from penstock.models.huggingface.frame import uncached
from penstock.models.huggingface.layers import TARGETS, model_layers
from penstock.models.huggingface.loss import COUNTED, POSITIONS, OwnLoss, Shift, split_batch
from penstock.models.huggingface.pictures import IMAGES, picture_form
from penstock.models.huggingface.routers import Routers
from penstock.models.huggingface.shrink import require_small, shrunken
from penstock.models.huggingface.weights import require_unquantized, shapes_of
from penstock.runtime import partition
from penstock.runtime.stage.stage import GATHERS
from penstock.runtime.tensors.pytree import flatten, unflatten

__all__ = ["require_equal", "sample_batch", "small_model"]

NUM_STAGES = 4
NUM_TOKENS, NUM_WRITTEN = 9, 6
NUM_SAMPLES = 2
SCALE = 5
BY_HAND = "compare it by hand, then give compare=False"
Batch = dict[str, Tensor]


class CopyError(DecoderError):
    """A config that has no small copy."""


class LossAndGradients(NamedTuple):
    """The results of a step: the loss over the batch, and each parameter's gradient, or None if it has none."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


def small_model(shapes: Any, anatomy: Anatomy) -> Any:
    """A model of the same class with a small copy of the config, weights of its own and no dropout.

    Raises:
        CopyError: no small copy can be made.
        DecoderError: a small copy would still be large, or the weights are quantized.
    """
    require_unquantized(shapes.config)
    try:
        config = shrunken(shapes, anatomy)
        require_small(shapes_of(copy.deepcopy(config), type(shapes)), shapes.config.model_type)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = type(shapes)(config).train()
    except DecoderError:
        raise
    except Exception as error:  # whatever a model's code raises where sizes do not go together
        raise CopyError(
            f"no small copy can be made of the config of a {shapes.config.model_type}, to compare its stages with "
            f"the whole model ({_said(error)}); {BY_HAND}"
        ) from error
    # What was set on the object itself, like a loss_function, is of the copy too.
    known = {name: each for name, each in vars(shapes).items() if name == "_loss_function" or name[0] != "_"}
    vars(small).update({name: each for name, each in known.items() if name not in vars(small)})
    for module in small.modules():
        if isinstance(module, nn.Dropout):  # some classes have a rate that no config says
            module.p = 0.0
    return small


def sample_batch(model: Any, seed: int, has_images: bool = True) -> Batch:
    """A few samples with labels, some of them padded.

    Each sample has an image if the model sees, and labels of another length if the model has an encoder.
    """
    config = model.config
    draw = torch.Generator().manual_seed(seed)
    if model.main_input_name == IMAGES:
        images = torch.randn(NUM_SAMPLES, config.num_channels, *_picture_size(config), generator=draw)
        return {IMAGES: images.to(model.device)}
    count = config.get_text_config(decoder=True).vocab_size
    special = getattr(config, "image_token_id", None)
    seen = _images(model, draw) if has_images else None
    num_tokens = NUM_TOKENS + (0 if seen is None else seen[1])
    tokens = torch.randint(0, count - 1, (NUM_SAMPLES, num_tokens), generator=draw)
    tokens[tokens == special] = 0 if special else 1
    if seen is not None:
        tokens[:, 1 : 1 + seen[1]] = int(special)  # type: ignore[arg-type]
    mask = torch.ones_like(tokens)
    mask[0, -2 - 5 * seed :] = 0  # of the second batch most, so that it counts for less
    mask[1, num_tokens - 4 * seed :] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    if has_encoder(config):
        batch["labels"] = torch.randint(1, count - 1, (NUM_SAMPLES, NUM_WRITTEN), generator=draw)
        batch["labels"][0, -2 - seed :] = -100
    batch |= {} if seen is None else {IMAGES: seen[0]}
    return {name: each.to(model.device) for name, each in batch.items()}


def own_batches(model: Any, labels: Sequence[str]) -> list[Batch]:
    """Two batches with labels of the first form for which the model's own forward returns a loss.

    Raises:
        DecoderError: it returns no loss for any form.
    """
    reason = ""
    for number in range(5):
        try:
            batches = [_with_labels(model, sample_batch(model, seed), labels, number) for seed in range(2)]
            with torch.no_grad():
                if (loss := returned(model, _joined(batches))["loss"]).dim():
                    raise ValueError(f"a loss of shape {list(loss.shape)} and not one number")
            return batches
        except Exception as error:  # whatever a model's code raises for labels of another form
            reason = reason or _said(error)
    raise DecoderError(
        f"{type(model).__name__} returns no loss for a small batch, whatever form the labels have ({reason}); "
        f"{BY_HAND}"
    )


def _with_labels(model: Any, batch: Batch, labels: Sequence[str], number: int) -> Batch:
    """A batch with labels of one of several forms.

    The forms are classes of samples, classes of tokens, numbers, tokens if the model writes some, and places of
    answers.
    """
    draw = torch.Generator(model.device).manual_seed(len(batch))
    count, classes = model.config.num_labels, torch.arange(NUM_SAMPLES, device=model.device)
    tokens = batch.pop("labels", classes[:, None])
    if "MultipleChoice" in type(model).__name__:  # of each sample two choices, [B, 2, T]
        batch = {name: torch.stack([each, each.roll(1, 1)], 1) for name, each in batch.items()}
    if set(POSITIONS) <= set(labels):
        return batch | {POSITIONS[0]: classes, POSITIONS[1]: classes + 2}
    numbers = torch.rand(NUM_SAMPLES, count, generator=draw, device=model.device)
    forms = [classes % count, (tokens % min(count, 2)).masked_fill(tokens == -100, -100), numbers[:, 0], numbers]
    forms = forms[2:] + forms[:2] if count == 1 else forms
    forms.insert(0 if model.get_output_embeddings() is not None else 4, tokens)
    return batch | {labels[0]: forms[number]}


def returned(model: Any, batch: Batch) -> Mapping[str, Any]:
    """The output of a model's own forward. Raises ValueError if it has no loss."""
    out = model(**batch, **uncached(model))
    if not isinstance(out, Mapping) or out.get("loss") is None:
        raise ValueError("its forward returns no 'loss' by that name")
    return out


def _joined(batches: Sequence[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def own_loss(model: Any, anatomy: Anatomy, known: OwnLoss | None = None) -> OwnLoss:
    """The model's own loss, and what it is a mean over.

    The loss of two batches taken as one must follow from the losses of each.

    Args:
        known: the result for a small copy; nothing else is tried then.

    Raises:
        DecoderError: the loss does not follow, whatever is counted.
    """
    batches = own_batches(model, anatomy.labels)
    tried = model
    if model.training:  # a copy, whose losses differ by more if what follows its blocks is larger
        tried = copy.deepcopy(model)
        for parameter in {p for path in anatomy.after for p in tried.get_submodule(path).parameters()}:
            parameter.data *= SCALE
        for module in tried.modules():
            if isinstance(module, GATHERS):  # in training it normalises each microbatch by itself
                module.eval()
    with torch.no_grad():
        each = torch.stack([returned(tried, batch)["loss"] for batch in batches])
        whole = returned(tried, _joined(batches))["loss"]
    targets = [split_batch(batch, anatomy.labels, model.main_input_name)[1] for batch in batches]

    def off(loss_fn: OwnLoss) -> float:
        weights = torch.tensor([float(loss_fn.weight(labels)) for labels in targets], device=whole.device)
        return float((each * (weights / weights.sum())).sum() - whole) / float(whole)

    nearest = min(map(OwnLoss, COUNTED), key=lambda loss_fn: abs(off(loss_fn))) if known is None else known
    if not abs(off(nearest)) <= (1e-6 if model.training else max(1e-3, 4 * torch.finfo(model.dtype).eps)):
        raise DecoderError(
            f"{_name(model)}: its own loss of two small batches is {whole.item():.7g}, and those of each are "
            f"{each[0].item():.7g} and {each[1].item():.7g}: no mean over {', nor over '.join(COUNTED)}, so it would "
            "be another loss where a batch is cut into microbatches. To train on the mean over microbatches all the "
            "same, give compare=False"
        )
    return nearest


def require_equal(model: Any, anatomy: Anatomy, routers: Routers | None, loss_fn: Any) -> None:
    """Cuts a small model into stages that share its weights, and compares their loss and gradients with its own.

    If the model is the one that is trained, in evaluation, results may differ by rounding. Gradients are compared if
    they are enabled.

    Raises:
        DecoderError: names the first difference.
    """
    what = f"a small copy of {_name(model)}" if model.training else _name(model)
    layers = model_layers(model, anatomy, routers, picture_form(model))
    parts = partition([1.0] * len(layers), min(NUM_STAGES, len(layers)))
    stages = [nn.Sequential(*layers[part.start : part.stop]).train(model.training) for part in parts]
    batches = [sample_batch(model, seed, has_images=model.training) for seed in range(2)]
    if anatomy.labels:
        batches = own_batches(model, anatomy.labels)
    split = [split_batch(batch, anatomy.labels, model.main_input_name) for batch in batches]
    weights = [loss_fn.weight(targets) for _, targets in split]
    shares = [weight / sum(weights) for weight in weights]
    shift = None if anatomy.encoder is None else Shift(model, anatomy)
    whole = None
    try:
        wanted_outputs = [returned(model, batch) for batch in batches]
        whole = _learnt(model, [out["loss"] for out in wanted_outputs], shares)
        outputs = _through(stages, split, shift)
        losses = [loss_fn(value, targets) for value, (_, targets) in zip(outputs, split, strict=True)]
        cut = _learnt(model, losses, shares)
    except DecoderError:
        raise
    except Exception as error:
        how = "does not run" if whole is None else "runs as a whole, and not cut into stages"
        raise DecoderError(f"{what} {how} ({_said(error)}); {BY_HAND}") from error
    rounding = 0.0 if model.training else max(1e-5, torch.finfo(model.dtype).eps / 16)
    is_same = _is_close(whole.loss, cut.loss, rounding)
    for out, value in zip(wanted_outputs, outputs, strict=True):
        named = value if isinstance(value, dict) else {"logits": value}
        is_same &= all(_is_close(each, out[name], 100 * rounding) for name, each in named.items() if name in out)
    if not is_same:
        raise DecoderError(
            f"{what}: cut into stages it has a loss of {cut.loss.item():.9g}, and as a whole of "
            f"{whole.loss.item():.9g}, so its forward does more than call its layers in order. {BY_STAGES}"
        )
    for parameter, wanted in whole.gradients.items():
        found = cut.gradients[parameter]
        zeros = next((torch.zeros_like(each) for each in (wanted, found) if each is not None), torch.zeros(()))
        wanted, found = zeros if wanted is None else wanted, zeros if found is None else found
        if not _is_close(wanted, found, 100 * rounding):
            raise DecoderError(
                f"{what}: cut into stages it has the loss of the whole, but the gradient of {parameter} "
                f"differs from that of the whole by up to {(wanted - found).abs().max().item():.3g}, so something "
                f"besides the hidden states passes between its layers. {BY_STAGES}"
            )


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Puts a model into evaluation, and restores its modes, gradients, buffers, settings and the generator."""
    modes = {module: module.training for module in model.modules()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    settings = dict(vars(model.config))
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield model.eval()
    finally:
        for module, is_training in modes.items():
            module.training = is_training
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for buffer, before in buffers.items():
            buffer.data.copy_(before)
        vars(model.config).update(settings)


def _is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=1e-2 * tolerance)


def _name(model: Any) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _learnt(model: Any, losses: Iterable[Tensor], shares: Sequence[float]) -> LossAndGradients:
    """Runs the backwards of the losses one after another. Gradients are summed by microbatch, as in the runtime."""
    total = torch.zeros((), device=model.device)
    sums: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for each, share in zip(losses, shares, strict=True):
        loss = each * share
        if loss.requires_grad:
            loss.backward()
        total = total + loss.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                before = sums[name]
                sums[name] = parameter.grad if before is None else before + parameter.grad
        model.zero_grad(set_to_none=True)
    return LossAndGradients(total, sums)


def _through(
    stages: Sequence[nn.Module], batches: Sequence[tuple[Any, Any]], shift: Shift | None = None
) -> list[Any]:
    """The outputs of the last stage for some microbatches, whose backwards go back through all stages.

    Each stage runs all microbatches before the next stage begins. So a value that a stage leaves elsewhere than in
    its output does not reach the next stage unseen. `shift` makes a decoder's input of labels.
    """
    values: list[Any] = [inputs for inputs, _ in batches]
    if shift is not None:
        values = [{**inputs, TARGETS: shift(labels)} for inputs, labels in batches]
    for stage in stages:
        values = [stage(_across(value)) for value in values]
    return values


def _across(value: Any) -> Any:
    leaves, skeleton = flatten(value)
    return unflatten([_StageBoundary.apply(leaf) if leaf.requires_grad else leaf for leaf in leaves], skeleton)


class _StageBoundary(torch.autograd.Function):
    """Passes the same numbers to the next stage, in memory of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def _picture_size(config: Any) -> tuple[int, int]:
    size = config.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


def _images(model: Any, draw: torch.Generator) -> tuple[Tensor, int] | None:
    """A picture per sample, and the number of tokens whose place it takes; None if a model takes no pictures."""
    form = picture_form(model)
    if form is None:
        return None
    return torch.randn((NUM_SAMPLES, form.num_channels, form.size, form.size), generator=draw), form.num_tokens
