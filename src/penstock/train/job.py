"""What a run is asked to do, from the options of `penstock train`. Needs no torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.rank_environment import RankEnvironment
from penstock.train.asynchronous import ASYNCHRONOUS, completed, usual_microbatches
from penstock.train.checks import SettingsError, said_by_file
from penstock.train.folder import RunFolder, free_folder
from penstock.train.kinds import GPT, check_lora_words, check_model, is_path, usual_of
from penstock.train.own_file import is_own, own_name
from penstock.train.settings import PLANNED, Settings, is_record, read_settings, share_out


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What a run was asked to do.

    Attributes:
        folder: the run's folder. as_json: print the report as JSON and nothing else.
        resume: continue from its newest checkpoint. checkpoint: its name, if there is one.
        export: a file for the model at the end, or None.
        verify: check on the first batch that model and loss keep the contract, before the first step.
        notices: what the user should know about how the options were read.
    """

    settings: Settings
    folder: str
    as_json: bool = False
    resume: bool = False
    export: str | None = None
    notices: tuple[str, ...] = ()
    checkpoint: str | None = None
    verify: bool = False


def read_schedule_file(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with what a schedule file says itself. Raises ScheduleError for a file that can't be read."""
    return {**given, **(said_by_file(given) if "schedule" in given else {})}


def _ranks_here(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, int]:
    """The ranks of a pipeline if a launcher has started the processes of the whole mesh.

    Args:
        given: the options. settings: the options and everything else that is known.

    Raises:
        SettingsError: sizes that do not multiply to the number of processes.
        RankEnvironmentError: the launcher says what cannot be.
    """
    environment = RankEnvironment.of(os.environ)
    if environment is None or settings.get("in_process"):
        return {}
    sizes = [settings.get(name) or 1 for name in ("dp", "tp")]
    return {"ranks": share_out(given.get("ranks"), sizes[0], sizes[1], environment.num_ranks)}


def order_of(
    given: dict[str, Any],
    out: str | None,
    resume: str | None,
    export: str | None,
    as_json: bool,
    verify: bool = False,
) -> TrainJob:
    """The order for the options given. In a resumed run, its own settings apply where no option is given.

    If `out` and `resume` are the same folder and no run is in it yet, a run begins there. So a launcher may start the
    same line again and again.

    Raises SettingsError, and ScheduleError for a schedule file that can't be read.
    """
    given = dict(given)
    if given.get("device") == "emulated":
        raise SettingsError("penstock emulate runs a schedule on emulated devices, with the options of simulate")
    if "model" in given:
        check_model(given["model"])
    paths = ["data", "tokenizer", *(["model"] if is_path(given.get("model", GPT)) else [])]
    if is_record(given.get("packing")):
        paths.append("packing")
    if "lora" in given:
        check_lora_words(given["lora"])  # before a folder is a whole path
        paths += ["lora"] if not given["lora"].lstrip().startswith("{") else []
    for name in paths:  # a run may be resumed from another folder
        if name in given:
            given[name] = os.path.abspath(given[name])
    if resume is not None and out is not None and os.path.abspath(out) != os.path.abspath(resume):
        raise SettingsError(f"--resume {resume} goes on in its own folder; leave out --out {out}")
    if out is not None and not RunFolder(Path(out)).settings.exists():
        resume = None
    if resume is None:
        given |= _ranks_here(given, given)
        if is_own(given.get("data")) and is_path(given.get("model", GPT)) and "batch" not in given:
            given |= _own_batch(given)
        settings = Settings.from_mapping(_completed(given))
        folder = RunFolder(Path(out)) if out is not None else free_folder(Path("runs"), _name_of(settings))
        folder.require_new(learns=True)
    else:
        folder = RunFolder(Path(resume))
        before = read_settings(folder.settings)
        if before.get("device") == "emulated":
            raise SettingsError(f"{folder.path}: emulated devices learned nothing to go on from; start a new run")
        saved = Settings.from_mapping(before, f"{folder.settings}: ")
        known = {**dataclasses.asdict(saved), **_cleared(given), **given}
        found = completed(known | _ranks_here(given, known))
        if "schedule" not in given:  # what is usual by now may be otherwise than when the run began
            found |= {name: known[name] for name in ("max_mismatch", "sharding")}
        settings = Settings.from_mapping(found)
    if verify and settings.is_asynchronous:
        raise SettingsError(
            f"--verify compares with a plain loop, and {settings.schedule} updates within its order; verify the "
            "model once with --schedule 1f1b --verify"
        )
    settings = dataclasses.replace(settings, threads=settings.num_threads)
    return TrainJob(
        settings=settings,
        folder=str(folder.path),
        resume=resume is not None,
        export=export,
        as_json=as_json,
        verify=verify,
    )


def _completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options given, completed with the defaults of their model and schedule."""
    own = {f.name: f.default for f in dataclasses.fields(Settings) if f.name in ("ranks", "microbatches", "steps")}
    usual = usual_of(given.get("model", GPT), given.get("data"))
    known = {**own, **{name: usual[name] for name in own if name in usual}, **given}
    if "microbatches" not in given and "schedule" in given:
        batch = known.get("batch", usual.get("batch", Settings.batch)) // max(1, known.get("dp", 1))
        known["microbatches"] = usual_microbatches(given["schedule"], known["ranks"], batch) or known["microbatches"]
    found = completed(known)
    return {**usual, **{name: value for name, value in found.items() if value is not None}}


def _own_batch(given: Mapping[str, Any]) -> dict[str, int]:
    """How many samples the user's own batches have, if the data determines it."""
    from penstock.train.tasks.own_data import own_batch  # here, as it loads torch

    size = own_batch(given["data"], given.get("seed", Settings.seed), given.get("dp", Settings.dp))
    return {} if size is None else {"batch": size}


def _name_of(settings: Settings) -> str:
    """The name of a run's folder, if none is given."""
    model = settings.preset if settings.model == GPT else f"{settings.model}-{settings.preset}"
    if is_own(settings.model):
        model = own_name(settings.model).name.lower()
    elif is_path(settings.model):
        path = Path(settings.model)
        model = path.parent.name if path.name == "config.json" else path.stem
    mesh = "" if settings.num_processes == settings.ranks else f"x{settings.dp}x{settings.tp}"
    return f"{model}-{Path(settings.schedule).stem}-{settings.ranks}{mesh}"


def _cleared(given: dict[str, Any]) -> dict[str, Any]:
    """Settings of a resumed run that no longer apply under another schedule: options that only the old one takes."""
    cleared: dict[str, Any] = {}
    if "schedule" in given:
        cleared |= {"window": None, "rule": None, "max_mismatch": None, "drain_every": None}
    if given.get("schedule") in ASYNCHRONOUS:
        cleared |= {"dispatch": "frozen", "adapt": False}
    if given.get("dp") == 1:
        cleared |= {"sharding": "copies"}
    if given.get("packing", PLANNED) != PLANNED:
        cleared |= {"microbatch_tokens": None}
    if "schedule" in given or "ranks" in given:
        cleared |= {"stages": None, "schedule_options": {}, "cut": None}
    return cleared
