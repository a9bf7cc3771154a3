"""The task that a run's settings ask for, and its schedule."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import TYPE_CHECKING

from penstock.library import build
from penstock.schedule import Schedule
from penstock.train.kinds import BERT, CLIP, GPT
from penstock.train.own_file import is_own
from penstock.train.settings import Settings

if TYPE_CHECKING:  # which loads torch
    from penstock.train.tasks.task import Task


def schedule_of(settings: Settings) -> Schedule:
    """The schedule of a run, checked. For a model of several towers it combines theirs; only this loads torch.

    Raises:
        SettingsError, ScheduleError: the settings ask for something impossible.
    """
    if settings.model == CLIP:
        from penstock.train.tasks.clip import clip_config, clip_schedule

        return clip_schedule(clip_config(settings), settings)
    return settings.replica_schedule(settings.replicas_here)


_TASKS = {GPT: ("chain", "GPTTask"), BERT: ("chain", "BERTTask"), CLIP: ("clip", "CLIPTask")}
"""By the name of a model its module and class there. A module loads torch, so only the one of the run is imported."""


def open_task(settings: Settings, schedule: Schedule) -> Task:
    """The task, checked, with nothing of the model built. Raises the errors of the tasks."""
    of_path = ("own", "OwnTask") if is_own(settings.model) else ("huggingface", "DecoderTask")
    module, name = _TASKS.get(settings.model, of_path)
    task: Task = getattr(import_module(f"penstock.train.tasks.{module}"), name)(settings, schedule)
    return task


def open_layers(settings: Settings) -> Task:
    """The task with one layer per stage; of a GPT, a BERT or a Hugging Face model."""
    whole = dataclasses.replace(settings, ranks=1, dp=1, tp=1, microbatches=1, cut=None, recompute=False)
    num_layers = len(open_task(whole, build("gpipe", 1, 1)).layer_costs)
    return open_task(dataclasses.replace(whole, cut=(1,) * num_layers), build("gpipe", num_layers, 1))
