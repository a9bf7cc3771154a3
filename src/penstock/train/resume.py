"""Where a resumed run continues, and what it must have in common with the run as it was. Checked before it starts.

Its model, data and training are those that it began with. Its steps, paths, mesh, schedule and machine may be others.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.runtime.checkpoint import CheckpointError, DamagedCheckpointError, Reader, candidates, complete
from penstock.train.folder import RunFolder
from penstock.train.inputs import Inputs
from penstock.train.kinds import is_path
from penstock.train.options import DATA, MODEL, TRAINING, options_of
from penstock.train.settings import Settings, SettingsError, read_settings
from penstock.train.training import position

MAY_CHANGE = {
    "steps", "data", "tokenizer", "packing", "microbatch_tokens", "sample", "recompute",
}  # fmt: skip
"""Settings of the model, the data and the training that a resumed run may have otherwise: its length, paths, and
what changes no gradient. The content of a path is compared instead.
"""


IS_PATH = {"model": is_path, "lora": lambda value: not value.startswith("{")}
"""Settings that may be a path, which a resumed run may have otherwise too."""


class ResumePoint(NamedTuple):
    """Where a run continues.

    Attributes:
        words: the same as text. steps: done so far. gathered: microbatches in the window that is open.
        checkpoint: its name, None if there is none yet.
    """

    words: str
    steps: int
    gathered: int
    checkpoint: str | None = None


def check_resume(inputs: Inputs, folder: RunFolder) -> ResumePoint:
    """Returns where the run continues.

    Raises:
        SettingsError: another model, data or training than it began with, or no steps left for it.
        CheckpointError: a damaged checkpoint.
    """
    saved = Settings.from_mapping(read_settings(folder.settings), f"{folder.settings}: ")
    now = inputs.settings
    _check_same(now, saved, folder)
    reader = _newest(folder)
    if reader is None:
        return ResumePoint("from the start, as it wrote no checkpoint", 0, 0)
    meta = reader.meta if isinstance(reader.meta, dict) else {}
    steps, gathered = position(meta, reader.step)
    if steps > now.steps:
        raise SettingsError(f"{folder.path} is at step {steps} already; give --steps {steps} or more")
    _check_window(now, steps, gathered, saved, folder)
    if meta.get("data") != inputs.data.digest:
        raise SettingsError(
            f"{folder.path} was trained on other data than {inputs.data.description}; "
            "give the --data and --tokenizer it was started with, unchanged"
        )
    amid = f", {gathered} of {now.window} microbatches of a window gathered" if gathered else ""
    return ResumePoint(f"from step {steps} ({reader.path}){amid}", steps, gathered, reader.path.name)


def damaged(error: DamagedCheckpointError, folder: RunFolder) -> CheckpointError:
    """The same error, and what can be done about it in a run."""
    if error.older is None:
        return CheckpointError(f"{error.damage}; no older checkpoint is whole: copy one there, or start a new run")
    return CheckpointError(
        f"{error.damage}; {error.older.name} before it is whole: remove or rename the damaged one, and go on from "
        f"there with penstock train --resume {folder.path}"
    )


def _newest(folder: RunFolder) -> Reader | None:
    """The newest checkpoint of a run, None if it never wrote one. Raises CheckpointError if it is damaged."""
    paths = list(candidates(folder.checkpoints))
    if not paths:
        return None
    try:
        reader = Reader(paths[0])
        reader.require_complete()
    except DamagedCheckpointError as error:
        older = next((each for each in paths[1:] if complete(each)), None)
        raise damaged(DamagedCheckpointError(error.damage, older), folder) from error
    return reader


def _check_same(now: Settings, saved: Settings, folder: RunFolder) -> None:
    """Raises SettingsError for a setting of the model, the data or the training that is another one."""
    for name, option in options_of(Settings).items():
        before, given = getattr(saved, name), getattr(now, name)
        stays = option.said.group in (MODEL, DATA, TRAINING) and name not in MAY_CHANGE
        moved = name in IS_PATH and None not in (before, given) and IS_PATH[name](before) and IS_PATH[name](given)
        if not stays or before == given or moved:
            continue
        raise SettingsError(
            f"{folder.path} was started with {name} {before!r}, not {given!r}; leave {option.flags[0]} out, or start "
            "a new run"
        )


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
