"""What a resumed run must have in common with the run as it was, told before any rank starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.runtime.checkpoint import CheckpointError, Reader, latest
from penstock.train.folder import RunFolder
from penstock.train.inputs import Inputs
from penstock.train.kinds import is_path
from penstock.train.settings import Settings, SettingsError, read_settings
from penstock.train.tasks.open import open_task
from penstock.train.training import position


def newest_checkpoint(folder: RunFolder) -> Path | None:
    """The newest complete checkpoint of a run, None where it never wrote one.

    Raises CheckpointError where there are some and none is complete.
    """
    found = latest(folder.checkpoints)
    if found is None and any(folder.checkpoints.glob("step-*")):
        raise CheckpointError(f"{folder.checkpoints}: no checkpoint is complete; copy one there, or start a new run")
    return found


class GoingOn(NamedTuple):
    """Where a run goes on: in words, after so many steps, with so many microbatches in the window that is open."""

    words: str
    steps: int
    gathered: int


def check_resume(inputs: Inputs, folder: RunFolder) -> GoingOn:
    """Returns where the run goes on.

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
        return GoingOn("from the start, as it wrote no checkpoint", 0, 0)
    reader = Reader(found)
    meta = reader.meta if isinstance(reader.meta, dict) else {}
    steps, gathered = position(meta, reader.step)
    if steps > now.steps:
        raise SettingsError(f"{folder.path} is at step {steps} already; give --steps {steps} or more")
    _check_window(now, steps, gathered, saved, folder)
    digest = meta.get("data")
    if digest != inputs.data.digest:
        raise SettingsError(
            f"{folder.path} was trained on other data than {inputs.data.description}; "
            "give the --data and --tokenizer it was started with, unchanged"
        )
    amid = f", {gathered} of {now.window} microbatches of a window gathered" if gathered else ""
    return GoingOn(f"from step {steps} ({found}){amid}", steps, gathered)


def _check_window(now: Settings, steps: int, gathered: int, saved: Settings, folder: RunFolder) -> None:
    """Raises SettingsError where the window that is open could not be closed as it was begun."""
    if not gathered:
        return
    passes = now.passes
    if now.window == saved.window and (passes.window - gathered) % passes.num_microbatches == 0:
        return
    missing = (saved.window or 0) - gathered
    raise SettingsError(
        f"{folder.path} is at step {steps}, and {gathered} of the {saved.window} microbatches of a window are "
        f"gathered; leave out --window, and give a --drain-every whose passes fill the other {missing}: "
        f"{saved.drain_every} steps do"
    )


def _check_same(inputs: Inputs, saved: Settings, folder: RunFolder) -> None:
    """Raises SettingsError for a model, or sizes, other than those of the run. Dropout may change."""
    now = inputs.settings
    if now.model != saved.model and not (is_path(now.model) and is_path(saved.model)):
        raise SettingsError(
            f"{folder.path} trains the model {saved.model}, not {now.model}; leave --model out, or start a new run"
        )
    before, after = _sizes_of(saved, now), inputs.task.sizes
    differ = [name for name in (before or after) if before.get(name) != after.get(name)] if before else []
    if differ:
        was = ", ".join(f"{name} {before.get(name)}" for name in differ)
        given = ", ".join(f"{name} {after.get(name)}" for name in differ)
        raise SettingsError(
            f"{folder.path} trains a model of {was}, not {given}; leave the model's sizes out, or start a new run"
        )


def _sizes_of(saved: Settings, now: Settings) -> Mapping[str, Any]:
    """The sizes that a run began with, cut as it goes on; none where its config is not there any more."""
    if is_path(saved.model) and not Path(saved.model).exists():
        return {}
    names = ("model", "preset", "depth", "width", "heads", "context", "tied")
    settings = dataclasses.replace(now, cut=None, **{name: getattr(saved, name) for name in names})
    return open_task(settings, settings.build_schedule()).sizes
