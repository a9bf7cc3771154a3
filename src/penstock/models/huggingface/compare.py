"""Whether an architecture, cut into stages, learns what it learns as a whole: tried on a small copy of its config.

The copy is trained for a step of two microbatches as a whole, with the model's own loss, and cut into stages, each of
which sees only what the one before it passes on. Loss and all gradients must be equal to the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.models.huggingface.anatomy import BY_STAGES, Anatomy, DecoderError, has_encoder
from penstock.models.huggingface.frame import uncached
from penstock.models.huggingface.layers import TARGETS, model_layers
from penstock.models.huggingface.loss import inputs_and_targets
from penstock.models.huggingface.own_loss import COUNTED, POSITIONS, OwnLoss, inputs_and_labels
from penstock.models.huggingface.pictures import IMAGES, PictureForm, picture_form
from penstock.models.huggingface.routers import Routers
from penstock.models.huggingface.shift import Shift
from penstock.models.huggingface.shrink import require_small, shrunken
from penstock.models.huggingface.weights import require_unquantized, shapes_of
from penstock.runtime import partition
from penstock.runtime.tensors.pytree import flatten, unflatten

__all__ = ["require_equal", "sample_batch", "small_model"]

NUM_STAGES = 4
NUM_TOKENS, NUM_WRITTEN = 9, 6
NUM_SAMPLES = 2
SCALE = 5
BY_HAND = "compare it by hand, then give compare=False"
Batch = dict[str, Tensor]
TokenLoss = Callable[..., Tensor]


class CopyError(DecoderError):
    """A config of which no small copy can be made."""


class LossAndGradients(NamedTuple):
    """What a step comes to: the loss over the batch, and the gradient of each parameter, None where there is none."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


def small_model(shapes: Any, anatomy: Anatomy) -> Any:
    """A model of the same class, of a small copy of its config, with weights of its own and without dropout.

    Raises:
        CopyError: there is none.
        DecoderError: one would still be large; the weights are quantized.
    """
    kind = shapes.config.model_type
    require_unquantized(shapes.config)
    try:
        config = shrunken(shapes, anatomy)
        require_small(shapes_of(copy.deepcopy(config), type(shapes)), kind)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = type(shapes)(config).train()
    except DecoderError:
        raise
    except Exception as error:  # whatever a model's code raises where sizes do not go together
        raise CopyError(
            f"no small copy can be made of the config of a {kind}, to compare its stages with the whole model "
            f"({type(error).__name__}: {error}); {BY_HAND}"
        ) from error
    # What was set on the object itself, like a loss_function, is of the copy too.
    known = {name: each for name, each in vars(shapes).items() if name == "_loss_function" or name[0] != "_"}
    vars(small).update({name: each for name, each in known.items() if name not in vars(small)})
    for module in small.modules():
        if isinstance(module, nn.Dropout):  # some classes have a rate that no config says
            module.p = 0.0
    return small


def sample_batch(model: Any, seed: int, has_images: bool = True) -> Batch:
    """A few samples with labels, some of them padded; with an image in each where the model sees, and with labels
    of another length where it has an encoder.
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
    """Two batches with labels of the first form with which the model's own forward returns a loss.

    Raises:
        DecoderError: there is none.
    """
    reason = ""
    for number in range(5):
        try:
            batches = [_with_labels(model, sample_batch(model, seed), labels, number) for seed in range(2)]
            with torch.no_grad():
                loss = plain_loss(model, _joined(batches))
            if loss.dim():
                raise ValueError(f"a loss of shape {list(loss.shape)} and not one number")
            return batches
        except Exception as error:  # whatever a model's code raises for labels of another form
            reason = reason or f"{type(error).__name__}: {error}"
    raise DecoderError(
        f"{type(model).__name__} returns no loss for a small batch, whatever form the labels have ({reason}); "
        f"{BY_HAND}"
    )


def _with_labels(model: Any, batch: Batch, labels: Sequence[str], number: int) -> Batch:
    """A batch with labels of one of several forms: classes of samples, classes of tokens, numbers; tokens of a model
    that writes some, and places of answers.
    """
    draw = torch.Generator().manual_seed(len(batch))
    tokens, count = batch.get("labels", torch.zeros(NUM_SAMPLES, 1)), model.config.num_labels
    rest = {name: each for name, each in batch.items() if name != "labels"}
    if "MultipleChoice" in type(model).__name__:  # of each sample two choices, [B, 2, T]
        rest = {name: torch.stack([each, each.roll(1, 1)], 1) for name, each in rest.items()}
    if set(POSITIONS) <= set(labels):
        places = [torch.randint(0, NUM_TOKENS, (NUM_SAMPLES,), generator=draw) for _ in POSITIONS]
        return rest | {name: each.to(model.device) for name, each in zip(POSITIONS, places, strict=True)}
    of_tokens = torch.randint(0, min(count, 2), tokens.shape, generator=draw).masked_fill(tokens == -100, -100)
    numbers = torch.rand(NUM_SAMPLES, generator=draw), torch.rand(NUM_SAMPLES, count, generator=draw)
    of_samples = torch.randint(0, min(count, 2), (NUM_SAMPLES,), generator=draw)
    forms = [*numbers, of_samples, of_tokens] if count == 1 else [of_samples, of_tokens, *numbers]
    writes = model.get_output_embeddings() is not None
    chosen = [tokens, *forms][number] if writes else [*forms, tokens][number]
    return rest | {labels[0]: chosen.to(model.device)}


def plain_loss(model: Any, batch: Batch) -> Tensor:
    """What a model's own forward returns as its loss."""
    out = model(**batch, **uncached(model))
    if not isinstance(out, Mapping) or out.get("loss") is None:
        has = ", ".join(map(str, out)) if isinstance(out, Mapping) else f"a {type(out).__name__}"
        raise ValueError(f"its forward returns {has}, and no 'loss' by that name")
    loss: Tensor = out["loss"]
    return loss


def _joined(batches: Sequence[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def has_plain_loss(model: Any, loss_fn: Any) -> bool:
    """Whether a model's own loss is the one that the pipeline would take of its output.

    Raises:
        DecoderError: the model does not run.
    """
    batch = sample_batch(model, 0)
    try:
        with torch.no_grad():
            out = model(**batch, **uncached(model))
    except Exception as error:
        raise DecoderError(f"a small copy of {_name(model)} does not run ({_said(error)}); {BY_HAND}") from error
    routers = getattr(out, "aux_loss", None)
    value: Any = out.logits
    if routers is not None:
        value = {"logits": out.logits, "router_loss": model.router_aux_loss_coef * routers}
    return torch.equal(loss_fn(value, batch["labels"]), out.loss)


def own_loss(model: Any, anatomy: Anatomy, known: OwnLoss | None = None) -> OwnLoss:
    """The model's own loss with what it is a mean over: the loss of both batches follows from those of each then.

    Args:
        known: what was found for a small copy; only that is tried.

    Raises:
        DecoderError: it does not follow, whatever is counted.
    """
    batches = own_batches(model, anatomy.labels)
    tried = model
    if model.training:  # a copy, whose losses differ by more if what follows its blocks is larger
        tried = copy.deepcopy(model)
        for parameter in {p for path in anatomy.after for p in tried.get_submodule(path).parameters()}:
            parameter.data *= SCALE
    with torch.no_grad():
        each = torch.stack([plain_loss(tried, batch) for batch in batches])
        whole = plain_loss(tried, _joined(batches))
    found = []
    tried_losses = [OwnLoss(counted) for counted in COUNTED] if known is None else [known]
    for loss_fn in tried_losses:
        targets = [_split(model, batch, anatomy.labels)[1] for batch in batches]
        weights = torch.tensor([float(loss_fn.weight(each)) for each in targets], device=whole.device)
        found.append(((each * weights).sum() / weights.sum() - whole).abs())
    nearest = min(range(len(found)), key=lambda number: found[number].item())
    if not found[nearest] <= (1e-6 if model.training else 1e-3) * whole.abs():
        raise DecoderError(
            f"{_name(model)}: its own loss of two small batches is {whole.item():.7g}, and those of each are "
            f"{each[0].item():.7g} and {each[1].item():.7g}: no mean over {', nor over '.join(COUNTED)}, so it would "
            "be another loss where a batch is cut into microbatches. To train on the mean over microbatches all the "
            "same, give compare=False"
        )
    return tried_losses[nearest]


def require_equal(model: Any, anatomy: Anatomy, routers: Routers | None, loss_fn: Any) -> None:
    """Cuts a small model into stages that share its weights, and compares them with it. Of the model that is trained
    itself, rounding may differ.

    Raises DecoderError with what differs first.
    """
    name = _name(model)
    layers = model_layers(model, anatomy, routers, _form(model))
    stages = [nn.Sequential(*layers[part.start : part.stop]).train(model.training) for part in _parts(anatomy)]
    batches = [sample_batch(model, seed) for seed in range(2)]
    if anatomy.labels:
        batches = own_batches(model, anatomy.labels)
    split = [_split(model, batch, anatomy.labels) for batch in batches]
    weights = [loss_fn.weight(targets) for _, targets in split]
    shares = [weight / sum(weights) for weight in weights]
    shift = Shift(model, anatomy) if anatomy.has_encoder else None
    whole = None
    try:
        whole = _learnt(model, (plain_loss(model, batch) for batch in batches), shares)
        cut = _learnt(model, iter(_through(stages, split, loss_fn, shift)), shares)
    except DecoderError:
        raise
    except Exception as error:
        how = "does not run" if whole is None else "runs as a whole, and not cut into stages"
        raise DecoderError(f"a small copy of {name} {how} ({_said(error)}); {BY_HAND}") from error
    is_same = torch.equal if model.training else _is_close
    if not is_same(whole.loss, cut.loss):
        raise DecoderError(
            f"{name}: cut into stages, a small copy has a loss of {cut.loss.item():.9g}, and as a whole of "
            f"{whole.loss.item():.9g}, so its forward does more than call its layers in order. {BY_STAGES}"
        )
    for parameter, wanted in whole.gradients.items():
        found = cut.gradients[parameter]
        zeros = next((torch.zeros_like(each) for each in (wanted, found) if each is not None), torch.zeros(()))
        wanted, found = zeros if wanted is None else wanted, zeros if found is None else found
        if not is_same(wanted, found):
            raise DecoderError(
                f"{name}: cut into stages, a small copy has the loss of the whole, but the gradient of {parameter} "
                f"differs from that of the whole by up to {(wanted - found).abs().max().item():.3g}, so something "
                f"besides the hidden states passes between its layers. {BY_STAGES}"
            )


def require_same_output(model: Any, layers: Sequence[nn.Module], anatomy: Anatomy, loss_fn: Any) -> None:
    """Compares what layers give, and their loss, with what the model that is trained gives itself, in evaluation.

    Raises:
        DecoderError: they differ.
    """
    name = _name(model)
    with untouched(model), torch.no_grad():
        if anatomy.labels:
            own_loss(model, anatomy, loss_fn)
            batch = own_batches(model, anatomy.labels)[0]
        else:
            batch = sample_batch(model, 0, has_images=False)
        (inputs, targets), whole = _split(model, batch, anatomy.labels), model(**batch, **uncached(model))
        try:
            if anatomy.has_encoder:
                inputs[TARGETS] = Shift(model, anatomy)(targets)
            value: Any = inputs
            for layer in layers:
                value = layer.eval()(value)
            loss = loss_fn(value, targets)
        except DecoderError:
            raise
        except Exception as error:
            raise DecoderError(f"{name} runs as a whole, and not cut into stages ({_said(error)})") from error
    found = value if isinstance(value, dict) else {"logits": value}
    if not all(_is_close(each, whole[key]) for key, each in found.items() if key in whole):
        raise DecoderError(
            f"{name}: its layers in a row do not give its own logits, so its forward does more than call them in "
            f"order. {BY_STAGES}"
        )
    if not _is_close(loss, whole["loss"]):
        raise DecoderError(
            f"{name}: its own loss is {whole['loss'].item():.9g}, and that of its layers in a row {loss.item():.9g}. "
            f"{BY_STAGES}"
        )


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Evaluates a model, and leaves it as it was: modes, gradients, buffers, settings, the generator."""
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


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-5)


def _name(model: Any) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _split(model: Any, batch: Batch, labels: Sequence[str]) -> tuple[dict[str, Any], Any]:
    if labels:
        return inputs_and_labels(batch, tuple(labels), model.main_input_name)
    return inputs_and_targets(batch)


def _parts(anatomy: Anatomy) -> list[range]:
    """The layers of each stage: of about as many, with a cut inside a tower for images where there is one."""
    count = anatomy.num_layers
    ends = {part.stop for part in partition([1.0] * count, min(NUM_STAGES, count))}
    if anatomy.tower is not None:
        ends.add(1 + anatomy.tower.num_called // 2)
    return [range(start, end) for start, end in pairwise([0, *sorted(ends)])]


def _learnt(model: Any, losses: Iterable[Tensor], shares: Sequence[float]) -> LossAndGradients:
    """The losses' backwards one after another; gradients are summed microbatch by microbatch, as the runtime does."""
    total = torch.zeros((), device=model.device)
    sums: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for each, share in zip(losses, shares, strict=True):
        loss = each * share
        loss.backward()
        total = total + loss.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                before = sums[name]
                sums[name] = parameter.grad if before is None else before + parameter.grad
        model.zero_grad(set_to_none=True)
    return LossAndGradients(total, sums)


def _through(
    stages: Sequence[nn.Module], batches: Sequence[tuple[Any, Any]], loss_fn: TokenLoss, shift: Shift | None = None
) -> list[Tensor]:
    """The losses of microbatches whose backwards go back through all stages.

    Each stage runs all of them before the next one begins, so that what one leaves behind elsewhere than in its
    output does not reach the next one unseen. `shift` makes of labels what a decoder is given.
    """
    values: list[Any] = [inputs for inputs, _ in batches]
    if shift is not None:
        values = [{**inputs, TARGETS: shift(labels)} for inputs, labels in batches]
    for stage in stages:
        values = [stage(_across(value)) for value in values]
    return [loss_fn(value, targets) for value, (_, targets) in zip(values, batches, strict=True)]


def _across(value: Any) -> Any:
    leaves, skeleton = flatten(value)
    return unflatten([_StageBoundary.apply(leaf) if leaf.requires_grad else leaf for leaf in leaves], skeleton)


class _StageBoundary(torch.autograd.Function):
    """What comes to the next stage: the same numbers, in memory of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def _picture_size(config: Any) -> tuple[int, int]:
    size = config.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


def _form(model: Any) -> PictureForm | None:
    """Of the pictures; None where a model takes none, or pictures of no one size, which are refused later."""
    try:
        return picture_form(model)
    except DecoderError:
        return None


def _images(model: Any, draw: torch.Generator) -> tuple[Tensor, int] | None:
    """Pictures, one a sample, and how many tokens each takes the place of; None where a model takes none."""
    form = _form(model)
    if form is None:
        return None
    return torch.randn((NUM_SAMPLES, form.num_channels, form.size, form.size), generator=draw), form.num_tokens
