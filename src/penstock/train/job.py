"""A training run as it was ordered."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.train.settings import Settings


@dataclass(frozen=True)
class TrainJob:
    """A run as it was ordered.

    Attributes:
        folder: the run's folder. resume: go on from its newest checkpoint. fallback: or from an older one, where
            that is damaged. checkpoint: the one that was found. damaged: newer ones that are passed over.
        export: a file for the model at the end, or None. as_json: print the report as JSON and nothing else.
        notices: what a person should know of how it was understood.
    """

    settings: Settings
    folder: str
    resume: bool = False
    export: str | None = None
    as_json: bool = False
    notices: tuple[str, ...] = ()
    fallback: bool = False
    checkpoint: str | None = None
    damaged: tuple[str, ...] = ()
