"""What a training run is asked to do. One flat value, the same on every rank, written into the run's folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cost import CostError, LinkConditions
from penstock.formats import load as load_schedule
from penstock.library import SCHEDULES, build
from penstock.schedule import Schedule, ScheduleError, check


class SettingsError(ValueError):
    """Settings that contradict one another or name what is not there."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run; every field has a value that works.

    Attributes:
        schedule: a library schedule's name, or a schedule file.
        ranks, microbatches, stages, warmup: what the schedule is built for.
        cut: how many layers each stage holds; None for stages of about equal cost.
        preset: sizes of the model (see `penstock.models.presets`); depth, width, heads, context, dropout and
            tied change single ones of them.
        data: None for the standard library's text, or a file, folder, .jsonl or .bin/.idx pair.
        tokenizer: a `tokenizers` JSON file, or None for bytes.
        batch: samples a step. lr is the peak of a warm-up and cosine decay, or constant.
        optimizer: a class of torch.optim by name; optimizer_options go to it besides lr.
        clip: most the gradient's norm may be; 0 for no clipping.
        precision: "float32", or "bfloat16": autocast with float32 master weights.
        recompute: activation checkpointing of every block.
        evaluate_every, save_every: in steps; 0 for at the end only. keep: checkpoints kept.
        dispatch: "frozen" or "dynamic". device: "cpu" or "cuda". timeout: seconds any wait may last.
        threads: of each rank; None for its share of the cores. A resumed run keeps them, since the last digits
            of a sum can depend on them.
        sample: tokens of text written at the end.
        in_process: all ranks in one process, in turn.
        link: conditions to inject into links, like "0:1=latency:30ms 1:2=loss:1%"; None for none.
    """

    schedule: str = "1f1b"
    ranks: int = 4
    microbatches: int = 8
    stages: int | None = None
    warmup: tuple[int, ...] | None = None
    cut: tuple[int, ...] | None = None
    dispatch: str = "frozen"
    preset: str = "tiny"
    depth: int | None = None
    width: int | None = None
    heads: int | None = None
    context: int | None = None
    dropout: float | None = None
    tied: bool | None = None
    data: str | None = None
    tokenizer: str | None = None
    steps: int = 400
    batch: int = 16
    lr: float = 4e-3
    lr_decay: str = "cosine"
    lr_warmup: int = 30
    optimizer: str = "AdamW"
    optimizer_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clip: float = 1.0
    precision: str = "float32"
    recompute: bool = False
    seed: int = 0
    evaluate_every: int = 100
    save_every: int = 100
    keep: int = 2
    device: str = "cpu"
    timeout: float = 60.0
    threads: int | None = None
    sample: int = 160
    in_process: bool = False
    link: str | None = None

    def __post_init__(self) -> None:
        for name, kind in typing.get_type_hints(type(self)).items():
            _check_type(name, getattr(self, name), kind)
        for name in ("ranks", "microbatches", "steps", "batch", "keep", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; give at least 1")
        for name in ("lr_warmup", "evaluate_every", "save_every", "sample", "clip"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} is {getattr(self, name)}; give at least 0")
        for name in ("lr", "timeout"):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} is {getattr(self, name):g}; give a number above 0")
        for name, choices in (
            ("lr_decay", ("cosine", "constant")),
            ("precision", ("float32", "bfloat16")),
            ("dispatch", ("frozen", "dynamic")),
            ("device", ("cpu", "cuda")),
        ):
            if getattr(self, name) not in choices:
                raise SettingsError(f"no {name} {getattr(self, name)!r}; choose {' or '.join(choices)}")
        self.link_conditions()
        if self.batch < self.microbatches:
            raise SettingsError(
                f"a batch of {self.batch} can't be cut into {self.microbatches} microbatches; "
                f"give a batch of at least {self.microbatches}, or fewer microbatches"
            )

    @property
    def num_threads(self) -> int:
        """Threads of each rank: as asked for, or its share of the cores; in one process as in many."""
        if self.threads is not None:
            return self.threads
        if os.environ.get("OMP_NUM_THREADS", "").isdigit():
            return max(1, int(os.environ["OMP_NUM_THREADS"]))
        return max(1, num_cores() // self.ranks)

    def link_conditions(self) -> LinkConditions | None:
        """The conditions to inject. Raises SettingsError for those that make no sense."""
        if self.link is None:
            return None
        try:
            conditions = LinkConditions.parse(self.link)
            conditions.check_ranks(self.ranks)
        except (CostError, ValueError) as error:
            raise SettingsError(f"--link: {error}") from None
        return conditions

    def build_schedule(self) -> Schedule:
        """The schedule, checked. Raises ScheduleError."""
        if not is_schedule_file(self.schedule):
            return build(self.schedule, self.ranks, self.microbatches, num_stages=self.stages, warmup=self.warmup)
        schedule = load_schedule(self.schedule)
        if (schedule.num_ranks, schedule.num_microbatches) != (self.ranks, self.microbatches):
            raise ScheduleError(
                f"{self.schedule} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} microbatches, "
                f"the run has {self.ranks} and {self.microbatches}; leave out --ranks and --microbatches",
                rule="options",
            )
        check(schedule)
        return schedule

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "") -> Settings:
        """Reads settings; `where` heads errors. Raises SettingsError for unknown names and wrong types."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise SettingsError(f"{where}unknown setting {unknown[0]!r}; it was written by another version")
        values = dict(values)
        for name in ("warmup", "cut"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        try:
            return cls(**values)
        except SettingsError as error:
            raise SettingsError(f"{where}{error}") from None


def is_schedule_file(schedule: str) -> bool:
    """Whether it means a file: it looks like a path, or is one and no library schedule has that name."""
    return schedule not in SCHEDULES and ("/" in schedule or bool(Path(schedule).suffix) or Path(schedule).exists())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_settings(path: Path) -> dict[str, Any]:
    """The saved settings of a run. Raises SettingsError where there are none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise SettingsError(f"{path.parent} is no run: it has no {path.name}; give the folder of a run") from None
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise SettingsError(
            f"{path} is damaged: it is no JSON object; copy it from a run with the same settings, or start anew"
        )
    return values


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Raises SettingsError unless `value` is of the field's type; a float field takes whole numbers too."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    plain = [typing.get_origin(k) or k for k in kinds]
    if isinstance(value, bool):
        fits = bool in plain
    elif isinstance(value, int):
        fits = int in plain or float in plain
    elif isinstance(value, tuple):
        fits = tuple in plain and all(type(v) is int for v in value)
    else:
        fits = any(isinstance(value, k) for k in plain)
    if not fits:
        words = [_WORDS[k] for k in plain if k in _WORDS]
        rest = "whole numbers" if tuple in plain else "an object"
        raise SettingsError(f"{name} is {value!r}; give {words[0] if words else rest}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{name} is {value}; give a finite number")
