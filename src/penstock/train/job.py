"""What a run was asked to do: its settings, its folder, and whether it prints JSON."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.train.emulated.settings import EmulatedSettings
from penstock.train.run_settings import RunSettings
from penstock.train.settings import Settings


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """What a run of any kind was asked to do.

    Attributes:
        folder: the run's folder. as_json: print the report as JSON and nothing else.
    """

    settings: RunSettings
    folder: str
    as_json: bool = False


@dataclass(frozen=True, kw_only=True)
class EmulatedJob(RunJob):
    """A run on emulated devices."""

    settings: EmulatedSettings


@dataclass(frozen=True, kw_only=True)
class TrainJob(RunJob):
    """A run that learns.

    Attributes:
        resume: continue from its newest checkpoint. fallback: or from an older one, if the newest is damaged.
        checkpoint: the one that was found. damaged: newer ones that are skipped.
        export: a file for the model at the end, or None.
        notices: what the user should know about how the options were read.
    """

    settings: Settings
    resume: bool = False
    export: str | None = None
    notices: tuple[str, ...] = ()
    fallback: bool = False
    checkpoint: str | None = None
    damaged: tuple[str, ...] = ()
