"""The task that a run's settings ask for, and its schedule."""

from __future__ import annotations

from penstock.schedule import Schedule
from penstock.train.own_file import is_own
from penstock.train.settings import Settings
from penstock.train.tasks.task import Task


def open_task(settings: Settings, schedule: Schedule) -> Task:
    """The task, checked; nothing of the model is built. Raises what the tasks raise."""
    if settings.model == "gpt":
        from penstock.train.tasks.gpt import GPTTask

        return GPTTask(settings, schedule)
    if settings.model == "bert":
        from penstock.train.tasks.bert import BERTTask

        return BERTTask(settings, schedule)
    if settings.model == "clip":
        from penstock.train.tasks.clip import CLIPTask

        return CLIPTask(settings, schedule)
    if is_own(settings.model):
        from penstock.train.tasks.own import OwnTask

        return OwnTask(settings, schedule)
    from penstock.train.tasks.huggingface import DecoderTask

    return DecoderTask(settings, schedule)
