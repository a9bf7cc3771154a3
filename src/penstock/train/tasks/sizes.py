"""The sizes of a model: a preset with the changes of the options, and whether processes can share it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from penstock.models import ParallelError, require_parallel
from penstock.models.dividing import require_vocabulary
from penstock.schedule import Schedule
from penstock.train.checks import SettingsError
from penstock.train.kinds import is_path
from penstock.train.settings import Settings

Config = TypeVar("Config")

OPTIONS = ("depth", "width", "heads", "context", "dropout", "tied")


def preset_of(settings: Settings, presets: Mapping[str, Config]) -> Config:
    """The preset by name. Raises SettingsError."""
    if settings.preset not in presets:
        near = difflib.get_close_matches(settings.preset, presets, n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(presets)}"
        of = "" if settings.model == "gpt" else f" of {settings.model}"
        raise SettingsError(f"no preset{of} named {settings.preset!r}; {hint}")
    return presets[settings.preset]


def changed(config: Any, settings: Settings, **more: Any) -> Any:
    """A config in which the sizes that the options name are replaced. Raises SettingsError."""
    given = {name: getattr(settings, name) for name in OPTIONS if getattr(settings, name) is not None}
    if "heads" in given:
        given["num_heads"] = given.pop("heads")
    try:
        return dataclasses.replace(config, **given, **more)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def words_of_sizes(settings: Settings, preset: object = None) -> str:
    """`tiny`, or `tiny with depth 3, width 32` if options change its sizes.

    Args:
        preset: the config of that name, whose own sizes are no changes; None if it has several.
    """
    given = {name: getattr(settings, name) for name in OPTIONS if getattr(settings, name) is not None}
    own = {name: getattr(preset, "num_heads" if name == "heads" else name, None) for name in given}
    changes = [
        {True: "tied weights", False: "weights not tied"}[value] if name == "tied" else f"{name} {value}"
        for name, value in given.items()
        if value != own[name]
    ]
    return f"{settings.preset} with {', '.join(changes)}" if changes else settings.preset


def kept_sizes(config: Any) -> dict[str, Any]:
    """The sizes in a config that a resumed run must share: all except dropout."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name != "dropout"}


def require_shards(settings: Settings, schedule: Schedule, config: Any, vocab_size: int | None = None) -> None:
    """Raises SettingsError for a model that processes cannot share. Each needs whole heads, and at least one word.

    Args:
        vocab_size: of the stages that several ranks of the schedule share.
    """
    try:
        require_parallel(config, settings.tp)
    except ParallelError as error:
        other = ", or other --heads" if "heads" in str(error) and not is_path(settings.model) else ""
        raise SettingsError(f"--tp {settings.tp}: {error}{other}") from None
    for _, ranks in schedule.placement.shared if vocab_size is not None else ():
        try:
            require_vocabulary(f"{schedule.name} with {settings.model}", vocab_size or 0, len(ranks))
        except ParallelError as error:
            raise SettingsError(str(error)) from None
