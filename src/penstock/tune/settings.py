"""What `penstock tune` is asked to do: one dataclass, from which its options and their help are made.

What the options do not say of the run that is tuned, such as sizes, optimizer or threads, comes from a file of
settings, as `penstock train --config` takes it. Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.train.checks import SettingsError, check_numbers
from penstock.train.kinds import check_model, is_path, usual_of
from penstock.train.options import MACHINE, MODEL, read_config, setting
from penstock.train.own_file import is_own
from penstock.train.settings import Settings

SEARCH, COSTS = "Search", "Costs"
"""Groups of settings."""

OF_RUN = ("model", "data", "preset", "batch", "device")
"""Options that say what is trained. They win over the file of settings."""
MEASURED = (
    "model_options", "depth", "width", "heads", "context", "dropout", "tied", "tokenizer", "precision", "optimizer",
    "optimizer_options", "clip", "threads", "dispatch",
)  # fmt: skip
"""Further settings of a run on which its measurements or its simulation depend."""
NOT_MEASURED = (
    "steps", "lr", "lr_decay", "lr_warmup", "seed", "evaluate_every", "save_every", "keep", "sample", "timeout",
)  # fmt: skip
"""Settings that change nothing for the tuner. A file of settings may have them."""


@dataclass(frozen=True)
class TuneSettings:
    """Settings of one call of the tuner; every field has a value that works.

    Attributes:
        config: a file of settings, which options win over.
        costs: a preset or a file, as `penstock simulate` takes it; None to measure costs here.
        memory_limit: bytes that a rank may need; None for no limit.
    """

    model: str | None = setting(
        None,
        "What is trained: gpt, bert, clip, a Hugging Face folder or config.json, or your own, nets.py:Net. [gpt]",
        MODEL,
        metavar="NAME|PATH",
    )
    data: str | None = setting(
        None,
        "What the model learns from: text (a file, folder, .jsonl or .bin/.idx), or your own, data.py:make_data. "
        "[Python's own library]",
        MODEL,
    )
    preset: str | None = setting(None, "Preset that says the sizes of the model. [tiny; of a clip nano]", MODEL)
    batch: int | None = setting(None, "Samples per step. [16; those of your own data]", MODEL)
    device: str | None = setting(None, "Device that ops run on: cpu or cuda. [cpu]", MACHINE)
    ranks: int | None = setting(None, "Number of ranks, at most. [as many as fit]", SEARCH)
    pp: tuple[int, ...] | None = setting(
        None, "Number of ranks per pipeline, or several to try: 2,4. [all]", SEARCH, metavar="N,N,..."
    )
    dp: tuple[int, ...] | None = setting(
        None, "Number of replicas of the pipeline, or several to try: 1,2. [all]", SEARCH, metavar="N,N,..."
    )
    microbatch_sizes: tuple[int, ...] | None = setting(
        None,
        "Samples per microbatch: one size, or several to try, as 1,2,4. [all; 1 to profile only]",
        SEARCH,
        flags=("--microbatch-size",),
        metavar="N,N,...",
    )
    schedules: tuple[str, ...] | None = setting(
        None,
        "Library schedule by name, to try; may be repeated. [all]",
        SEARCH,
        flags=("--schedule",),
        metavar="NAME",
        is_repeated=True,
    )
    recompute: bool | None = setting(
        None,
        "Let forwards run again, so that blocks keep only their input, or not. [both, if memory is limited]",
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
    verify: int = setting(0, "How many of the best to run for real.", SEARCH)
    profile_only: bool = setting(
        False, "Measure layers and messages, and search nothing. --ranks is then 1 if not given.", COSTS
    )
    seconds: float = setting(1.0, "For how many seconds to measure, each microbatch size.", COSTS)
    config: Path | None = None
    costs: str | None = None
    memory_limit: float | None = None

    def __post_init__(self) -> None:
        check_numbers(
            self,
            least={**dict.fromkeys(("batch", "ranks", "top"), 1), "verify": 0},
            above_zero=("seconds", "memory_limit"),
        )

    def run_settings(self) -> Settings:
        """The settings of `penstock train` of the run that is tuned. Paths are absolute.

        Raises:
            SettingsError: a file with settings that the tuner chooses itself, and what a run itself would raise.
        """
        configured = {} if self.config is None else read_config(self.config, Settings)
        for name in configured.keys() - {*OF_RUN, *MEASURED, *NOT_MEASURED}:
            raise SettingsError(
                f"--config {self.config} has {name.replace('_', '-')}, which penstock tune chooses, or does not "
                "tune; leave it out of the file"
            )
        options = {name: value for name in OF_RUN if (value := getattr(self, name)) is not None}
        given: dict[str, Any] = {"model": "gpt", "threads": 1, **configured, **options}
        model: str = given["model"]
        check_model(model)  # as it was typed, and not as an absolute path
        for name in ("data", "tokenizer", *(["model"] if is_path(model) else [])):
            if name in given:
                given[name] = os.path.abspath(given[name])
        usual = self._usual(model, given)
        return Settings(**{**usual, **given, "microbatches": 1, "ranks": 1})

    def _usual(self, model: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults of a kind of model, and of batches of the user's own the number of samples."""
        data: str | None = given.get("data")
        known = {*OF_RUN, *MEASURED}
        usual = {name: value for name, value in usual_of(model, data).items() if name in known}
        if "batch" not in given and data is not None and is_own(data) and is_path(model):
            from penstock.train.tasks.own_data import own_batch  # here, as it loads torch

            size = own_batch(data, 0, 1)
            usual |= {} if size is None else {"batch": size}
        return usual
