"""What a resumed run must have in common with the run as it was. Checked before any rank starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.runtime.checkpoint import CheckpointError, DamagedCheckpointError, Reader, candidates, complete
from penstock.train.folder import RunFolder
from penstock.train.inputs import Inputs
from penstock.train.kinds import is_there, same_kind
from penstock.train.settings import Settings, SettingsError, read_settings
from penstock.train.tasks.open import open_task, schedule_of
from penstock.train.training import position


class FoundCheckpoint(NamedTuple):
    """The checkpoint from which a run continues.

    Attributes:
        reader: None if the run never wrote one.
        damaged: names of newer ones that are skipped. notices: what is wrong with each.
    """

    reader: Reader | None
    damaged: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def find_checkpoint(folder: RunFolder, fallback: bool) -> FoundCheckpoint:
    """The newest checkpoint of a run; with `fallback`, the newest that is whole to the last byte.

    Raises CheckpointError if it is damaged, or all are.
    """
    damaged: list[str] = []
    notices: list[str] = []
    for path in candidates(folder.checkpoints):
        try:
            reader = Reader(path)
            reader.require_complete()
            if fallback:
                reader.verify()
        except DamagedCheckpointError as error:
            if not fallback:
                older = next((each for each in candidates(path)[1:] if complete(each)), None)
                raise way_back(DamagedCheckpointError(error.damage, older), folder) from error
            damaged.append(path.name)
            notices.append(f"{error.damage}; set aside as {path.name}.damaged")
            continue
        return FoundCheckpoint(reader, tuple(damaged), tuple(notices))
    if damaged:
        raise CheckpointError(
            f"{folder.checkpoints}: no checkpoint is whole; copy one there, or start a new run\n{notices[0]}"
        )
    return FoundCheckpoint(None)


def way_back(error: DamagedCheckpointError, folder: RunFolder) -> CheckpointError:
    """The same error, and what can be done about it in a run."""
    if error.older is None:
        return CheckpointError(f"{error.damage}; no older checkpoint is whole: copy one there, or start a new run")
    return CheckpointError(
        f"{error.damage}; {error.older.name} before it is whole: go on from there with "
        f"penstock train --resume {folder.path} --fallback"
    )


class ResumePoint(NamedTuple):
    """Where a run continues.

    Attributes:
        words: the same as text. steps: done so far. gathered: microbatches in the window that is open.
        checkpoint: its name, None if there is none yet. damaged: names of newer ones that are skipped.
        notices: what is wrong with each.
    """

    words: str
    steps: int
    gathered: int
    checkpoint: str | None = None
    damaged: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def check_resume(inputs: Inputs, folder: RunFolder, fallback: bool = False) -> ResumePoint:
    """Returns where the run continues.

    Args:
        fallback: whether it may be an older checkpoint if the newest is damaged.

    Raises:
        SettingsError: another model, optimizer, seed or data than it began with, or no steps left for it.
        CheckpointError: a damaged checkpoint.
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
    found = find_checkpoint(folder, fallback)
    reader = found.reader
    if reader is None:
        return ResumePoint("from the start, as it wrote no checkpoint", 0, 0)
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
    words = f"from step {steps} ({reader.path}){amid}"
    return ResumePoint(words, steps, gathered, reader.path.name, found.damaged, found.notices)


def _check_window(now: Settings, steps: int, gathered: int, saved: Settings, folder: RunFolder) -> None:
    """Raises SettingsError if the window that is open could not be closed in the way in which it began."""
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
    if not same_kind(now.model, saved.model):
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
    """The sizes that a run began with, cut for the run as it continues. None if its config no longer exists."""
    if not is_there(saved.model):
        return {}
    names = ("model", "model_options", "lora", "preset", "depth", "width", "heads", "context", "tied")
    settings = dataclasses.replace(now, cut=None, **{name: getattr(saved, name) for name in names})
    return open_task(settings, schedule_of(settings)).sizes
