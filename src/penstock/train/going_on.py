"""What a resumed run must have in common with the run as it was, told before any rank starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from penstock.runtime.checkpoint import CheckpointError, Reader, latest
from penstock.train.folder import RunFolder
from penstock.train.inputs import Inputs
from penstock.train.model import model_config
from penstock.train.settings import Settings, SettingsError, read_settings


def newest_checkpoint(folder: RunFolder) -> Path | None:
    """The newest complete checkpoint of a run, None where it never wrote one.

    Raises CheckpointError where there are some and none is complete.
    """
    found = latest(folder.checkpoints)
    if found is None and any(folder.checkpoints.glob("step-*")):
        raise CheckpointError(f"{folder.checkpoints}: no checkpoint is complete; copy one there, or start a new run")
    return found


def check_resume(inputs: Inputs, folder: RunFolder) -> str:
    """Returns where the run goes on, in words.

    Raises:
        SettingsError: another model, optimizer, seed or data than it began with, or no steps left for it.
        CheckpointError: no complete checkpoint, or a damaged index.
    """
    saved = Settings.from_mapping(read_settings(folder.settings), f"{folder.settings}: ")
    now = inputs.settings
    _check_same(inputs, saved, folder)
    for name in ("seed", "optimizer", "optimizer_options"):
        if getattr(now, name) != getattr(saved, name):
            raise SettingsError(
                f"{folder.path} was started with {name} {getattr(saved, name)!r}, not {getattr(now, name)!r}; "
                "leave it out, or start a new run"
            )
    found = newest_checkpoint(folder)
    if found is None:
        return "from the start, as it wrote no checkpoint"
    reader = Reader(found)
    if reader.step > now.steps:
        raise SettingsError(f"{folder.path} is at step {reader.step} already; give --steps {reader.step} or more")
    digest = reader.meta.get("data") if isinstance(reader.meta, dict) else None
    if digest != inputs.corpus.digest:
        raise SettingsError(
            f"{folder.path} was trained on other data than {inputs.corpus.description}; "
            "give the --data and --tokenizer it was started with, unchanged"
        )
    return f"from step {reader.step} ({found})"


def _check_same(inputs: Inputs, saved: Settings, folder: RunFolder) -> None:
    """Raises SettingsError for sizes other than those of the run. Dropout may change."""
    before = dataclasses.asdict(model_config(saved, inputs.config.vocab_size))
    after = dataclasses.asdict(inputs.config)
    differ = [name for name in before if before[name] != after[name] and name != "dropout"]
    if differ:
        was = ", ".join(f"{name} {before[name]}" for name in differ)
        given = ", ".join(f"{name} {after[name]}" for name in differ)
        raise SettingsError(
            f"{folder.path} trains a model of {was}, not {given}; leave the model's sizes out, or start a new run"
        )
