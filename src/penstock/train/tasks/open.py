"""The task that a run's settings ask for, and its schedule."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

from penstock.library import build
from penstock.schedule import Schedule
from penstock.train.checks import read_schedule
from penstock.train.kinds import CLIP
from penstock.train.own_file import is_own
from penstock.train.settings import Settings

if TYPE_CHECKING:  # which loads torch
    from penstock.train.tasks.task import LayeredTask, Task


def schedule_of(settings: Settings) -> Schedule:
    """The schedule of a run, checked. For a model of several towers it combines theirs; only this loads torch.

    Raises:
        SettingsError, ScheduleError: the settings ask for something impossible.
    """
    if settings.model == CLIP:
        from penstock.train.tasks.clip import clip_config, clip_schedule

        return clip_schedule(clip_config(settings), settings)
    if settings.replicas_here == 1:
        return settings.replica_schedule()
    count = settings.microbatches * settings.replicas_here
    return read_schedule(settings.schedule, settings.ranks, count, settings.stages, others=settings.schedule_options)


def open_task(settings: Settings, schedule: Schedule) -> Task:
    """The task, checked, with nothing of the model built. Raises the errors of the tasks."""
    if settings.model == "gpt":
        from penstock.train.tasks.gpt import GPTTask

        return GPTTask(settings, schedule)
    if settings.model == "bert":
        from penstock.train.tasks.bert import BERTTask

        return BERTTask(settings, schedule)
    if settings.model == CLIP:
        from penstock.train.tasks.clip import CLIPTask

        return CLIPTask(settings, schedule)
    if is_own(settings.model):
        from penstock.train.tasks.own import OwnTask

        return OwnTask(settings, schedule)
    from penstock.train.tasks.huggingface import DecoderTask

    return DecoderTask(settings, schedule)


def open_layers(settings: Settings) -> LayeredTask:
    """The task with one layer per stage; of a GPT, a BERT or a Hugging Face model."""
    whole = dataclasses.replace(settings, ranks=1, dp=1, tp=1, microbatches=1, cut=None, recompute=False)
    num_layers = len(_layered(whole, build("gpipe", 1, 1)).layer_costs)
    return _layered(dataclasses.replace(whole, cut=(1,) * num_layers), build("gpipe", num_layers, 1))


def _layered(settings: Settings, schedule: Schedule) -> LayeredTask:
    task = open_task(settings, schedule)
    assert hasattr(task, "layer_costs"), f"{settings.model} is no known chain of layers"
    return cast("LayeredTask", task)
