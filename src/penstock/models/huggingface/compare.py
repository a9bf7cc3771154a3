"""Whether an architecture, cut into stages, learns what it learns as a whole: tried on a small copy of its config.

The copy is trained for a step of two microbatches as a whole, with the model's own loss, and cut into stages, each of
which sees only what the one before it passes on. Loss and all gradients must be equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.models.huggingface.anatomy import Anatomy, DecoderError, has_encoder
from penstock.models.huggingface.layers import TARGETS, model_layers
from penstock.models.huggingface.loss import inputs_and_targets
from penstock.models.huggingface.pictures import IMAGES, PictureForm, picture_form
from penstock.models.huggingface.routers import Routers
from penstock.models.huggingface.shift import Shift
from penstock.models.huggingface.shrink import require_small, shrunken
from penstock.models.huggingface.weights import model_of, shapes_of
from penstock.runtime import partition
from penstock.runtime.tensors.pytree import flatten, unflatten

__all__ = ["require_equal", "sample_batch", "small_model"]

NUM_STAGES = 4
NUM_TOKENS, NUM_WRITTEN = 9, 6
NUM_SAMPLES = 2
BY_HAND = "compare it by hand, then give compare=False"
Batch = dict[str, Tensor]
TokenLoss = Callable[..., Tensor]


class LossAndGradients(NamedTuple):
    """What a step comes to: the loss over the batch, and the gradient of each parameter, None where there is none."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


def small_model(shapes: Any, anatomy: Anatomy) -> Any:
    """A model of a small copy of a config, with weights of its own. Raises DecoderError where there is none."""
    kind = shapes.config.model_type
    try:
        config = shrunken(shapes, anatomy)
        require_small(shapes_of(config), kind)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return model_of(config).train()
    except DecoderError:
        raise
    except Exception as error:  # whatever a model's code raises where sizes do not go together
        raise DecoderError(
            f"no small copy can be made of the config of a {kind}, to compare its stages with the whole model "
            f"({type(error).__name__}: {error}); {BY_HAND}"
        ) from error


def sample_batch(model: Any, seed: int) -> Batch:
    """A few samples with labels, of which one is padded; with an image in each where the model sees, and with labels
    of another length where it has an encoder.
    """
    config = model.config
    count = config.get_text_config(decoder=True).vocab_size
    draw = torch.Generator().manual_seed(seed)
    special = getattr(config, "image_token_id", None)
    images = _images(model, draw)
    num_tokens = NUM_TOKENS + (0 if images is None else images[1])
    tokens = torch.randint(0, count - 1, (NUM_SAMPLES, num_tokens), generator=draw)
    tokens[tokens == special] = 0 if special else 1
    if images is not None:
        tokens[:, 1 : 1 + images[1]] = int(special)  # type: ignore[arg-type]
    mask = torch.ones_like(tokens)
    mask[0, -2:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    if has_encoder(config):
        batch["labels"] = torch.randint(1, count - 1, (NUM_SAMPLES, NUM_WRITTEN), generator=draw)
        batch["labels"][0, -2:] = -100
    return batch if images is None else {**batch, IMAGES: images[0]}


def require_equal(model: Any, anatomy: Anatomy, routers: Routers | None, loss_fn: Any) -> None:
    """Cuts a model into stages that share its weights, and compares them with it.

    Raises DecoderError with what differs first.
    """
    name = f"{type(model).__name__} ({model.config.model_type})"
    layers = model_layers(model, anatomy, routers, _form(model))
    stages = [nn.Sequential(*layers[part.start : part.stop]) for part in _parts(anatomy)]
    batches = [sample_batch(model, seed) for seed in range(2)]
    weights = [loss_fn.weight(batch["labels"]) for batch in batches]
    shares = [weight / sum(weights) for weight in weights]
    shift = Shift(model, anatomy) if anatomy.has_encoder else None
    whole = None
    try:
        whole = _learnt(model, (model(**batch, use_cache=False).loss for batch in batches), shares)
        _require_plain_loss(model, batches[0], loss_fn, name)
        cut = _learnt(model, iter(_through(stages, batches, loss_fn, shift)), shares)
    except DecoderError:
        raise
    except Exception as error:
        how = "does not run" if whole is None else "runs as a whole, and not cut into stages"
        raise DecoderError(f"a small copy of {name} {how} ({type(error).__name__}: {error}); {BY_HAND}") from error
    if not torch.equal(whole.loss, cut.loss):
        raise DecoderError(
            f"{name}: cut into stages, a small copy has a loss of {cut.loss.item():.9g}, and as a whole of "
            f"{whole.loss.item():.9g}, so its forward does more than call its layers in order"
        )
    for parameter, wanted in whole.gradients.items():
        found = cut.gradients[parameter]
        zeros = next((torch.zeros_like(each) for each in (wanted, found) if each is not None), torch.zeros(()))
        wanted, found = zeros if wanted is None else wanted, zeros if found is None else found
        if not torch.equal(wanted, found):
            raise DecoderError(
                f"{name}: cut into stages, a small copy has the loss of the whole, but the gradient of {parameter} "
                f"differs from that of the whole by up to {(wanted - found).abs().max().item():.3g}, so something "
                "besides the hidden states passes between its layers"
            )


def _parts(anatomy: Anatomy) -> list[range]:
    """The layers of each stage: of about as many, with a cut inside a tower for images where there is one."""
    count = anatomy.num_layers
    ends = {part.stop for part in partition([1.0] * count, min(NUM_STAGES, count))}
    if anatomy.tower is not None:
        ends.add(1 + anatomy.tower.num_called // 2)
    return [range(start, end) for start, end in pairwise([0, *sorted(ends)])]


def _learnt(model: Any, losses: Iterable[Tensor], shares: Sequence[float]) -> LossAndGradients:
    """The losses' backwards one after another; gradients are summed microbatch by microbatch, as the runtime does."""
    total = torch.zeros(())
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
    stages: Sequence[nn.Module], batches: Sequence[Batch], loss_fn: TokenLoss, shift: Shift | None = None
) -> list[Tensor]:
    """The losses of microbatches whose backwards go back through all stages.

    Each stage runs all of them before the next one begins, so that what one leaves behind elsewhere than in its
    output does not reach the next one unseen. `shift` makes of labels what a decoder is given.
    """
    values: list[Any] = [inputs_and_targets(batch)[0] for batch in batches]
    if shift is not None:
        values = [{**value, TARGETS: shift(batch["labels"])} for value, batch in zip(values, batches, strict=True)]
    for stage in stages:
        values = [stage(_across(value)) for value in values]
    return [loss_fn(value, batch["labels"]) for value, batch in zip(values, batches, strict=True)]


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


def _require_plain_loss(model: Any, batch: Batch, loss_fn: Any, name: str) -> None:
    """Raises DecoderError where a model's own loss is not the one that the pipeline takes of its output."""
    with torch.no_grad():
        out = model(**batch, use_cache=False)
    routers = getattr(out, "aux_loss", None)
    value: Any = out.logits
    if routers is not None:
        value = {"logits": out.logits, "router_loss": model.router_aux_loss_coef * routers}
    mean = loss_fn(value, batch["labels"])
    if not torch.equal(mean, out.loss):
        raise DecoderError(
            f"{name}: its own loss is {out.loss.item():.9g}, and the cross-entropy of its logits"
            f"{'' if routers is None else ' with the loss of its routers'} {mean.item():.9g}; a loss with more in it "
            "than that is not known here, so give your own loss_fn and compare=False"
        )


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
