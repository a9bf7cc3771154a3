"""Compares an architecture as a whole with its stages, on a small copy of its config.

The copy is trained twice for a step of two microbatches: as a whole, with the model's own loss, and cut into stages.
Each stage sees only the output of the one before. The loss and all gradients must be equal to the last bit.

The copy has fewer heads, experts, words and blocks than the config, and no dropout. Every kind of block that the
model has is in the copy: blocks are alike if their modules have the same classes and the same settings other than
numbers ("sliding_attention", has a bias). Sizes of a head stay, as rotary embeddings depend on them; what is as wide
as all heads together shrinks with their number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.models.huggingface.anatomy import BY_STAGES, Anatomy, DecoderError, blocks_of, has_encoder
from penstock.models.huggingface.frame import uncached
from penstock.models.huggingface.layers import TARGETS, model_layers
from penstock.models.huggingface.loss import COUNTED, POSITIONS, OwnLoss, Shift, split_batch
from penstock.models.huggingface.pictures import IMAGES, picture_form
from penstock.models.huggingface.routers import Routers
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


DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
ENCODER_DEPTHS = ("num_layers", "encoder_layers", "num_hidden_layers")
DECODER_DEPTHS = ("num_decoder_layers", "decoder_layers")
HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
GROUPS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
WIDTHS = ("n_embd", "d_model", "n_inner", "d_inner", "d_ff", "ffn_dim", "word_embed_proj_dim")
WIDE = ("hidden_size", "intermediate_size", "embedding_size")
"""Ends of names of widths."""
INNER = ("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff", "ffn_dim")
"""Ends of names of widths on which nothing depends in a model with heads."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MOST: Mapping[str, int] = {
    **dict.fromkeys(EXPERTS, 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "topk_group"), 2),
    "n_group": 4,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 4),
}
"""Of these no more than so many."""
LEAST_BLOCKS = 3
NUM_WORDS = 64
NARROW = 64
"""Width of a model without heads, and most that is used between two layers of an MLP."""
ALIGNED = 4
"""What widths are multiples of, as some matrix products ask for 16 bytes."""
MOST_WEIGHTS = 60_000_000
"""Of a copy."""


def shrunken(model: Any, anatomy: Anatomy) -> Any:
    """A small copy of a model's config; the model's weights may lie on the meta device.

    Raises:
        DecoderError: the copy is still large.
    """
    num_blocks = _enough(blocks_of(model, anatomy.blocks))
    small = copy.deepcopy(model.config)
    text = small.get_text_config(decoder=True)
    read = getattr(text, "hidden_size", None)
    for each in _configs(small):
        was = getattr(each, "num_hidden_layers", None)
        _shrink(each)
        if each is small and anatomy.encoder is not None:
            _cut_both(small, _enough(blocks_of(model, anatomy.encoder.blocks)), num_blocks)
        elif was is not None:
            _cut(each, int(was), num_blocks if each is text else min(int(was), _least_inside(model.config)))
    for each in _configs(small):  # pictures that are projected to what the decoder reads still are
        if read is not None and getattr(each, "projection_dim", None) == read:
            each.projection_dim = text.hidden_size
    _shrink_images(small, getattr(small, "vision_config", small))
    return small


def require_small(model: nn.Module, kind: str) -> None:
    """Raises DecoderError for a copy with too many weights."""
    count = sum(each.numel() for each in model.parameters())
    if count > MOST_WEIGHTS:
        raise DecoderError(
            f"no small copy can be made of the config of a {kind}: it still has {count:,} weights, and "
            f"{MOST_WEIGHTS:,} are the most for a comparison with the whole model; compare it by hand, then give "
            "compare=False"
        )


def _configs(config: Any) -> list[Any]:
    """A config and those in it."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(below for each in inner if each is not None for below in _configs(each))]


def _shrink(config: Any) -> None:
    scale = _scale(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif name in MOST:
            setattr(config, name, min(value, MOST[name]))
        elif name in (*HEADS, *GROUPS, *WIDTHS) or name.endswith((*WIDE, *INNER, "_num_heads")):
            unit = 1 if "head" in name else ALIGNED
            less = min(value, unit * math.ceil(value * scale / unit))
            setattr(config, name, min(less, NARROW) if name.endswith(INNER) and _heads(config) else less)
        elif name in ("vocab_size", "decoder_vocab_size"):
            setattr(config, name, min(value, NUM_WORDS))
    _renumber(config)


def _scale(config: Any) -> Fraction:
    """By what the number of heads shrinks, and every width with it."""
    heads = _heads(config)
    if heads is None:
        width = getattr(config, "hidden_size", NARROW)
        return Fraction(1, max(1, width // NARROW)) if isinstance(width, int) else Fraction(1)
    groups = next((getattr(config, name) for name in GROUPS if isinstance(vars(config).get(name), int)), heads)
    few = min(groups, 2) * min(heads // groups if heads % groups == 0 else heads, 2)
    return min(Fraction(few, heads), Fraction(1))


def _heads(config: Any) -> int | None:
    return next((getattr(config, name) for name in HEADS if isinstance(vars(config).get(name), int)), None)


def _renumber(config: Any) -> None:
    """Special tokens whose numbers the vocabulary has no more become its last words."""
    count = getattr(config, "vocab_size", None) or getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if not isinstance(count, int):
        return
    fresh = iter(range(min(count, NUM_WORDS) - 1, 0, -1))
    for name, value in list(vars(config).items()):
        if name.endswith(("_token_id", "_token_index")):
            if isinstance(value, int) and value >= min(count, NUM_WORDS):
                setattr(config, name, next(fresh))
            elif isinstance(value, list):
                setattr(config, name, [min(each, count - 1) for each in value])


def _cut(config: Any, was: int, now: int) -> None:
    """Fewer blocks, and as many entries in whatever has one for each."""
    for name, value in list(vars(config).items()):
        if name in DEPTHS and value == was:
            setattr(config, name, now)
        elif isinstance(value, list | tuple) and len(value) == was:
            setattr(config, name, value[:now])


def _cut_both(config: Any, encoder: int, decoder: int) -> None:
    """Fewer blocks in an encoder and in a decoder, which have depths of their own."""
    for names, now in ((ENCODER_DEPTHS, encoder), (DECODER_DEPTHS, decoder)):
        for name in names:
            if isinstance(vars(config).get(name), int):
                setattr(config, name, now)


def _enough(blocks: Iterable[nn.Module]) -> int:
    """How many blocks it takes to have one of every kind."""
    kinds: set[tuple[Any, ...]] = set()
    last = count = 0
    for number, block in enumerate(blocks, 1):
        count = number
        kind = tuple((name, type(each), _settings(each)) for name, each in block.named_modules())
        if kind not in kinds:
            kinds.add(kind)
            last = number
    return min(count, max(last, LEAST_BLOCKS))


def _least_inside(config: Any) -> int:
    """Blocks of a tower for images: so many that it has those whose hidden states are taken."""
    taken = getattr(config, "vision_feature_layer", None)
    numbers = [taken] if isinstance(taken, int) else list(taken or ())
    return max(LEAST_BLOCKS, *map(abs, numbers), 0)


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """What distinguishes a module from one of the same class, sizes and numbers aside."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, str | bool | None)}
    return (*sorted(plain.items(), key=lambda each: each[0]), *sorted(module._parameters))


def _shrink_images(config: Any, images: Any) -> None:
    """Pictures of two by two patches."""
    size, patch = getattr(images, "image_size", None), getattr(images, "patch_size", None)
    if isinstance(size, int) and isinstance(patch, int) and size > 2 * patch:
        images.image_size = 2 * patch
        if isinstance(getattr(config, "image_seq_length", None), int):
            config.image_seq_length = 4
