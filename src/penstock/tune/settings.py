"""What `penstock tune` is asked to do: one dataclass, from which its options and their help are made.

Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.train.checks import check_numbers
from penstock.train.kinds import check_model, is_path, usual_of
from penstock.train.options import MACHINE, MODEL, same_setting, setting
from penstock.train.own_file import is_own
from penstock.train.settings import Settings

SEARCH, COSTS = "Search", "Costs"
"""Groups of settings that the help lists."""

TRAINED = (
    "model", "model_options", "data", "preset", "depth", "width", "heads", "context", "dropout", "tied",
    "tokenizer", "batch", "precision", "optimizer", "optimizer_options", "clip", "device", "threads", "dispatch",
)  # fmt: skip
"""Settings of the runs that are tuned. They are those of `penstock train`."""


@dataclass(frozen=True)
class TuneSettings:
    """Settings of one call of the tuner; every field has a value that works.

    Attributes:
        costs: a preset or a file, as `penstock simulate` takes it; None to measure costs here.
        memory_limit: bytes that a rank may need; None for no limit.
    """

    model: str = same_setting(Settings, "model")
    model_options: Mapping[str, Any] = same_setting(Settings, "model_options")
    data: str | None = same_setting(Settings, "data")
    preset: str | None = setting(
        None, "Preset that says the sizes of the model. [tiny; of a clip nano]", MODEL, is_common=True
    )
    depth: int | None = same_setting(Settings, "depth")
    width: int | None = same_setting(Settings, "width")
    heads: int | None = same_setting(Settings, "heads")
    context: int | None = same_setting(Settings, "context")
    dropout: float | None = same_setting(Settings, "dropout")
    tied: bool | None = same_setting(Settings, "tied")
    tokenizer: str | None = same_setting(Settings, "tokenizer")
    batch: int | None = setting(None, "Samples per step. [16; those of your own data]", MODEL, is_common=True)
    precision: str = same_setting(Settings, "precision")
    optimizer: str = same_setting(Settings, "optimizer")
    optimizer_options: Mapping[str, Any] = same_setting(Settings, "optimizer_options")
    clip: float = same_setting(Settings, "clip")
    device: str = setting("cpu", "Device that ops run on: cpu or cuda.", MACHINE)
    threads: int = setting(1, "Threads per rank.", MACHINE)
    dispatch: str = setting("frozen", "How ranks choose their ops: frozen, hinted, dynamic or auto.", SEARCH)
    ranks: int | None = setting(None, "Number of ranks, at most. [as many as fit]", SEARCH, is_common=True)
    pp: tuple[int, ...] | None = setting(
        None, "Number of ranks per pipeline, or several to try: 2,4. [all]", SEARCH, is_common=True, metavar="N,N,..."
    )
    dp: tuple[int, ...] | None = setting(
        None,
        "Number of replicas of the pipeline, or several to try: 1,2. [all]",
        SEARCH,
        is_common=True,
        metavar="N,N,...",
    )
    microbatch_sizes: tuple[int, ...] | None = setting(
        None,
        "Samples per microbatch: one size, or several to try, as 1,2,4. [all]",
        SEARCH,
        is_common=True,
        flags=("--microbatch-size",),
        metavar="N,N,...",
    )
    schedules: tuple[str, ...] | None = setting(
        None,
        "Library schedule by name, to try; may be repeated. [all]",
        SEARCH,
        is_common=True,
        flags=("--schedule",),
        metavar="NAME",
        is_repeated=True,
    )
    schedule_options: Mapping[str, Any] = same_setting(Settings, "schedule_options")
    recompute: bool | None = setting(
        None,
        "Let forwards run again, so that blocks keep only their input: try that too, or not. [if memory is limited]",
        SEARCH,
    )
    shared_ends: bool | None = setting(
        None,
        "Let all ranks together run the first and the last part, embedding and head, or none. [both, where one costs "
        "more than a rank's even part, or memory is limited]",
        SEARCH,
    )
    programs: bool = setting(
        True, "Also search schedules without a name, unless --schedule is given. [search them]", SEARCH
    )
    top: int = setting(10, "How many candidates to show.", SEARCH)
    verify: int = setting(0, "How many of the best to run for real.", SEARCH, is_common=True)
    steps: int = setting(10, "How many steps to run, each of them twice, with --verify.", SEARCH)
    profile_only: bool = setting(
        False,
        "Measure layers and messages, and search nothing. --ranks is then 1 if not given.",
        COSTS,
        is_common=True,
    )
    seconds: float = setting(1.0, "For how many seconds to measure, each microbatch size.", COSTS)
    fresh: bool = setting(False, "Measure again what was measured before.", COSTS)
    database: str | None = setting(
        None, "Folder of measurements. [one in your cache folder]", COSTS, metavar="FOLDER"
    )
    costs: str | None = None
    memory_limit: float | None = None

    def __post_init__(self) -> None:
        counts = ("batch", "depth", "width", "heads", "context", "threads", "ranks", "top", "steps")
        check_numbers(self, least={**dict.fromkeys(counts, 1), "verify": 0}, above_zero=("seconds", "memory_limit"))

    def run_settings(self) -> Settings:
        """The settings of `penstock train` of the run that is tuned. Paths are absolute.

        Raises:
            SettingsError: what a run itself would raise.
        """
        check_model(self.model)  # by the words given, before they are a path
        given = {name: value for name in TRAINED if (value := getattr(self, name)) is not None}
        for name in ("data", "tokenizer", *(["model"] if is_path(self.model) else [])):
            if name in given:
                given[name] = os.path.abspath(given[name])
        usual = {name: value for name, value in usual_of(self.model, self.data).items() if name in TRAINED}
        if self.batch is None and is_own(self.data) and is_path(self.model):
            from penstock.train.tasks.own_data import own_batch  # here, as it loads torch

            size = own_batch(given["data"], 0, 1)
            usual |= {} if size is None else {"batch": size}
        return Settings(**{**usual, **given, "microbatches": 1, "ranks": 1})
