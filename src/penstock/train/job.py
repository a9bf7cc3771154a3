"""What a run was asked to do, and how its parent hands that to its ranks: in a folder, read and checked once.

order.json      the settings and what to do with them
corpus.json     what the corpus is; absent for a .bin/.idx pair, which every rank maps by itself, and without text
train.npy  validation.npy
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data import Corpus
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


ROWS = ("train", "validation", "train_starts", "validation_starts")


def hand_over(folder: Path, order: RunJob, corpus: Corpus | None) -> None:
    """Writes what `take_over` reads. Raises RuntimeFailure if the disk refuses."""
    try:
        _write_job(folder, order, corpus)
    except OSError as error:
        from penstock.runtime.errors import RuntimeFailure  # loads torch, which checks of options do without

        raise RuntimeFailure(
            f"what ranks need could not be written to {folder}: {error.strerror or error}; make room there, or set "
            "TMPDIR to a folder on another disk"
        ) from None


def _write_job(folder: Path, order: RunJob, corpus: Corpus | None) -> None:
    (folder / "order.json").write_text(json.dumps(dataclasses.asdict(order)), encoding="utf-8")
    if corpus is None or any(isinstance(getattr(corpus, name), np.memmap) for name in ROWS):
        return
    plain = {f.name: getattr(corpus, f.name) for f in dataclasses.fields(corpus) if f.name not in ROWS}
    (folder / "corpus.json").write_text(json.dumps(plain), encoding="utf-8")
    for name in ROWS:
        np.save(folder / f"{name}.npy", getattr(corpus, name), allow_pickle=False)


def take_over(folder: Path) -> tuple[TrainJob | EmulatedJob, Corpus | None]:
    """The order, and the corpus as mapped files; None for a corpus that a rank opens by itself.

    The folder may be removed once every rank has taken over. Mapped files stay readable.
    """
    value: dict[str, Any] = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    settings = value.pop("settings")
    if settings["device"] == "emulated":
        return EmulatedJob(settings=EmulatedSettings.from_mapping(settings), **value), None
    value |= {name: tuple(value[name]) for name in ("notices", "damaged")}
    order = TrainJob(settings=Settings.from_mapping(settings), **value)
    if not (folder / "corpus.json").exists():
        return order, None
    plain = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    rows = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ROWS}
    return order, Corpus(**plain, **rows)
