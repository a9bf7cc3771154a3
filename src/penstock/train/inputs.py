"""What a run starts from: schedule, text, model and optimizer, all read and checked before anything starts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from penstock.data import Batches, ByteTokenizer, Corpus, Tokenizer, load_tokenizer, open_corpus, validation_batches
from penstock.models import CrossEntropy, GPTConfig, tied_parameters
from penstock.runtime import Pipeline
from penstock.schedule import Schedule
from penstock.train.model import model_config, stage_builders
from penstock.train.settings import Settings, SettingsError


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run starts from, the same on every rank."""

    settings: Settings
    schedule: Schedule
    tokenizer: Tokenizer
    corpus: Corpus
    config: GPTConfig


def gather_inputs(settings: Settings) -> Inputs:
    """Reads and checks everything a run needs before anything starts.

    Raises:
        SettingsError, ScheduleError, PartitionError, DataError: in one or two lines.
    """
    schedule = settings.build_schedule()
    tokenizer = load_tokenizer(settings.tokenizer) if settings.tokenizer else ByteTokenizer()
    corpus = open_corpus(settings.data, tokenizer)
    config = model_config(settings, corpus.vocab_size)
    stage_builders(config, schedule.num_stages, settings.seed, settings.recompute)
    Batches(corpus.train, settings.batch, config.context, settings.seed, corpus.vocab_size)[0]
    validation_batches(corpus.validation, settings.batch, config.context, 1, corpus.vocab_size)
    optimizer_class(settings)
    return Inputs(settings, schedule, tokenizer, corpus, config)


def optimizer_class(settings: Settings) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer by name with its options. Raises SettingsError."""
    found = getattr(torch.optim, settings.optimizer, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise SettingsError(f"torch.optim has no optimizer {settings.optimizer!r}; AdamW and SGD are two it has")
    defaults = {"betas": (0.9, 0.95), "weight_decay": 0.1} if settings.optimizer == "AdamW" else {}
    options = {**defaults, **settings.optimizer_options}
    build: Callable[..., torch.optim.Optimizer] = functools.partial(found, lr=settings.lr, **options)  # type: ignore[call-arg]
    try:
        build([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{settings.optimizer} refuses its options {options}: {error}") from None
    return build


def build_pipeline(inputs: Inputs) -> Pipeline:
    """The pipeline of a run, over torch.distributed where it is set up."""
    settings, schedule, config = inputs.settings, inputs.schedule, inputs.config
    return Pipeline(
        stage_builders(config, schedule.num_stages, settings.seed, settings.recompute),
        schedule,
        loss_fn=CrossEntropy(),
        optimizer=optimizer_class(settings),
        dispatch=settings.dispatch,
        device=_device(settings),
        autocast=torch.bfloat16 if settings.precision == "bfloat16" else None,
        clip_norm=settings.clip or None,
        tied=tied_parameters(config),
        seed=settings.seed,
        timeout=settings.timeout,
    )


def _device(settings: Settings) -> torch.device:
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingsError(f"device {settings.device!r} asked for, but torch finds no GPU; use --device cpu")
    return torch.device("cuda", torch.cuda.current_device())
