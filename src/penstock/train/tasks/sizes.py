"""The sizes of a model: a preset with what the options change in it, and whether it can be shared out."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from penstock.train.checks import SettingsError
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
    """A config with the sizes that the options name in place of its own. Raises SettingsError."""
    given = {name: getattr(settings, name) for name in OPTIONS if getattr(settings, name) is not None}
    if "heads" in given:
        given["num_heads"] = given.pop("heads")
    try:
        return dataclasses.replace(config, **given, **more)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def refuse(settings: Settings, names: tuple[str, ...], why: str) -> None:
    """Raises SettingsError where one of these options is given."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value is not False:
            shown = f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')} {value}"
            raise SettingsError(f"{shown}: {why}; leave it out")


def require_shards(what: str, num_shards: int, num_heads: int, vocab_size: int | None = None) -> None:
    """Raises SettingsError for a model whose heads or words tensor parallelism cannot share out.

    Args:
        num_shards: processes of a tensor-parallel group.
    """
    if num_heads % num_shards:
        near = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise SettingsError(
            f"{what} has {num_heads} heads, which --tp {num_shards} does not divide, and each shard computes whole "
            f"heads; give --tp {' or '.join(map(str, near[:4]))}, or other --heads"
        )
    if vocab_size is not None:
        require_words(what, vocab_size, num_shards)


def require_words(what: str, vocab_size: int, num_ranks: int) -> None:
    """Raises SettingsError for a vocabulary with fewer words than ranks that share it."""
    if vocab_size < num_ranks:
        raise SettingsError(
            f"{what} has a vocabulary of {vocab_size}, smaller than the {num_ranks} ranks that are to share it; give "
            "fewer of them, or a larger vocabulary"
        )
