"""What a run starts from: schedule, text, model and optimizer, all read and checked before anything starts."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Callable

import numpy as np
import torch

from penstock.data import (
    Batches,
    ByteTokenizer,
    Corpus,
    Tokenizer,
    entropies,
    load_tokenizer,
    open_corpus,
    validation_batches,
)
from penstock.models import CrossEntropy, GPTConfig, tied_parameters
from penstock.runtime import Pipeline, RuntimeFailure
from penstock.runtime.steering import Steering
from penstock.runtime.weights.rules import rule_of
from penstock.schedule import Schedule
from penstock.train.model import model_config, stage_builders
from penstock.train.settings import Settings, SettingsError
from penstock.train.shared_loss import SharedLoss, WeighedLoss

ENTROPY_TOKENS = 1 << 26
"""Tokens of either side from which the report's entropies are counted."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run starts from, the same on every rank."""

    settings: Settings
    schedule: Schedule
    tokenizer: Tokenizer
    corpus: Corpus
    config: GPTConfig


def gather_inputs(settings: Settings, corpus: Corpus | None = None) -> Inputs:
    """Reads and checks everything a run needs before anything starts; `corpus`, if given, is not read again.

    Raises:
        SettingsError, ScheduleError, PartitionError, DataError: in one or two lines.
    """
    schedule = settings.build_schedule()
    tokenizer = load_tokenizer(settings.tokenizer) if settings.tokenizer else ByteTokenizer()
    device_of(settings)
    _check_rule(settings, schedule, optimizer_class(settings))
    _check_tied(model_config(settings, tokenizer.vocab_size), schedule)
    corpus = corpus or open_corpus(settings.data, tokenizer)
    config = model_config(settings, corpus.vocab_size)
    stage_builders(config, schedule.num_stages, settings.seed, settings.recompute, settings.cut)
    Batches(corpus.train, settings.batch, config.context, settings.seed, corpus.vocab_size)[0]
    validation_batches(corpus.validation, settings.batch, config.context, 1, corpus.vocab_size)
    return Inputs(settings, schedule, tokenizer, corpus, config)


def _check_rule(settings: Settings, schedule: Schedule, build: Callable[..., torch.optim.Optimizer]) -> None:
    """Raises SettingsError where the rule by which ops read weights has no formula for the optimizer."""
    if schedule.updates is None:
        return
    rule = rule_of(schedule.updates.rule)
    try:
        rule.require(build([torch.nn.Parameter(torch.zeros(1))]))
        rule.require_schedule(schedule, settings.zero == "on")
    except RuntimeFailure as error:
        raise SettingsError(f"{schedule.name} with --optimizer {settings.optimizer}: {error}") from None


def _check_tied(config: GPTConfig, schedule: Schedule) -> None:
    """Raises SettingsError for a weight of two stages that are updated at different times."""
    if config.tied and schedule.updates is not None and schedule.num_stages > 1:
        raise SettingsError(
            f"embedding and head share one weight, and {schedule.name} updates their stages at different times; give "
            "--no-tied, or a schedule that updates all stages together"
        )


def check_tokens(corpus: Corpus) -> None:
    """Raises DataError where the data has a token outside the vocabulary, in what the entropies will count."""
    for tokens in (corpus.train, corpus.validation):
        if np.iinfo(tokens.dtype).max >= corpus.vocab_size:
            entropies(tokens[:ENTROPY_TOKENS], tokens[:2], corpus.vocab_size)


def optimizer_class(settings: Settings) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer by name with its options. Raises SettingsError where it can't train a GPT with them."""
    found = getattr(torch.optim, settings.optimizer, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)) or found is torch.optim.Optimizer:
        names = [name for name, value in vars(torch.optim).items() if isinstance(value, type)]
        near = difflib.get_close_matches(settings.optimizer, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "AdamW and SGD are two it has"
        raise SettingsError(f"torch.optim has no optimizer {settings.optimizer!r}; {hint}")
    defaults = {"betas": (0.9, 0.95), "weight_decay": 0.1} if settings.optimizer == "AdamW" else {}
    options = {**defaults, **settings.optimizer_options}
    build: Callable[..., torch.optim.Optimizer] = functools.partial(found, lr=settings.lr, **options)  # type: ignore[call-arg]
    if (settings.optimizer, settings.optimizer_options) != (Settings.optimizer, {}):  # a trial takes a second
        _try(build, settings)
    return build


def _try(build: Callable[..., torch.optim.Optimizer], settings: Settings) -> None:
    """Makes an optimizer over a weight and a bias and runs it once. Raises SettingsError for what it refuses."""
    parameters = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        build(parameters).step()
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        options = f" with {json.dumps(settings.optimizer_options)}" if settings.optimizer_options else ""
        raise SettingsError(
            f"optimizer {settings.optimizer}{options} can't be used: {reason}; "
            "torch.optim documents the options, and AdamW and SGD work without any"
        ) from None


def build_pipeline(inputs: Inputs, steering: Steering | None = None) -> Pipeline:
    """The pipeline of a run, over torch.distributed where it is set up."""
    settings, schedule, config = inputs.settings, inputs.schedule, inputs.config
    return Pipeline(
        stage_builders(config, schedule.num_stages, settings.seed, settings.recompute, settings.cut),
        schedule,
        loss_fn=loss_of(settings),
        optimizer=optimizer_class(settings),
        dispatch=settings.dispatch,
        device=device_of(settings),
        autocast=torch.bfloat16 if settings.precision == "bfloat16" else None,
        clip_norm=settings.clip or None,
        tied=tied_parameters(config),
        seed=settings.seed,
        timeout=settings.timeout,
        transport=settings.transport,
        depth=settings.link_depth,
        delegates=settings.travel.delegate_options(),
        links=settings.link_conditions(),
        steering=steering,
        zero=settings.zero == "on",
    )


def loss_of(settings: Settings) -> WeighedLoss:
    """The loss of a pass: its part of the window where several fill one."""
    num_passes = settings.passes.passes_a_window
    return CrossEntropy() if num_passes == 1 else SharedLoss(CrossEntropy(), num_passes)


def device_of(settings: Settings) -> torch.device:
    """Where the stages run. Raises SettingsError where there is no such device."""
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingsError("device 'cuda' was asked for and torch finds no GPU; use --device cpu")
    return torch.device("cuda", torch.cuda.current_device())
