"""The measurements that a search needs: read from a folder if they are in it, and measured otherwise.

Each measurement is one JSON file, so that nothing is measured twice:

    9f86d081884c7d65.json    {"key": {"model": ..., "device": ..., "torch": ..., ...}, "value": {...}}

The key holds everything that the numbers depend on, and the file is named by a hash of the key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import torch

from penstock.formats.files import converted, replaced
from penstock.formats.profile import BYTES, KINDS, TIMES, MessageCosts, Profile
from penstock.train.settings import Settings
from penstock.tune.device import device_name
from penstock.tune.errors import TuneError
from penstock.tune.job import Task, WorkerAnswer, run_job
from penstock.tune.layers import NO_LAYER
from penstock.tune.tuned_model import TunedModel

T = TypeVar("T", bound=Profile | MessageCosts)

VERSION = 4
"""Version of how we measure. Measurements of another version are not used."""

BUSY = 0.2
"""Cores that other programs may keep busy before a notice says that this disturbs the measurements."""


@dataclass(frozen=True)
class NeededProfile:
    """A profile that a search needs: of all layers or, if several ranks share the first and the last
    layer, of these two.
    """

    microbatch_size: int
    num_parallel: int
    recompute: bool
    num_sharing: int = 1


@dataclass(frozen=True)
class NeededMessages:
    """What messages cost among so many ranks or, of one rank, what the runtime costs without them."""

    num_parallel: int


def default_folder() -> Path:
    """`penstock/measurements` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache).

    Raises:
        TuneError: this user has no such folder, as in a container.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser() / "penstock" / "measurements"
    except RuntimeError:
        raise TuneError("this user has no home folder to keep measurements in; set HOME or XDG_CACHE_HOME") from None


class Measurements:
    """The measurements in one folder, which is made when needed; None for `default_folder`.

    Raises:
        TuneError: the folder can't be made.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder = folder or default_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TuneError(
                f"measurements can't be kept in {folder}: {error.strerror}; set XDG_CACHE_HOME to another folder"
            ) from None

    def get(self, key: Mapping[str, Any], form: type[T]) -> T | None:
        """Reads what was measured under this key, or returns None.

        Raises:
            TuneError: the file is damaged. The message names the file.
        """
        path = self._path(key)
        try:
            found = converted(json.loads(path.read_text(encoding="utf-8"))["value"], form)
            found.check()
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise TuneError(f"{path} is damaged ({error}); delete it to measure again") from None
        return found

    def put(self, key: Mapping[str, Any], value: Profile | MessageCosts) -> None:
        """Stores a measurement. It replaces an older one under the same key."""
        with replaced(self._path(key)) as beside:
            text = json.dumps({"key": key, "value": msgspec.to_builtins(value)}, allow_nan=False)
            beside.write_text(text, encoding="utf-8")

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(key, sort_keys=True, allow_nan=False)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


class Meter:
    """Measures one model on this machine, and remembers the results.

    Args:
        measurements: where results are kept.
        seconds: to measure each microbatch size and number of ranks.
        say: is called with a line before something is measured.

    Attributes:
        model: that is measured. threads: of each rank. say: is called with a line before something is measured.
        profiles, transfers: what was prepared; transfers by number of ranks.
        num_measured, num_reused: profiles and transfers that were measured now, or before.
    """

    def __init__(
        self,
        model: TunedModel,
        settings: Settings,
        measurements: Measurements,
        seconds: float = 1.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.num_measured = self.num_reused = 0
        self._disturbed: list[tuple[float, str]] = []
        self.model, self._settings = model, settings
        self._measurements, self._seconds = measurements, seconds
        self.say = say or (lambda line: None)
        self.threads = settings.threads or 1
        self.profiles: dict[NeededProfile, Profile] = {}
        self.transfers: dict[int, MessageCosts] = {}

    def knows(self, need: NeededProfile | NeededMessages) -> bool:
        """Whether it was measured before. If so, it is read."""
        is_profile = isinstance(need, NeededProfile)
        if need in self.profiles if is_profile else need.num_parallel in self.transfers:
            return True
        form: type[Profile | MessageCosts] = Profile if is_profile else MessageCosts
        known = self._measurements.get(self._key(need), form)
        if known is None:
            return False
        self.num_reused += 1
        self._set(need, known)
        return True

    def keep(self, need: NeededProfile | NeededMessages, answer: WorkerAnswer) -> None:
        """Takes the answer of the ranks that did its task, and stores it."""
        if isinstance(need, NeededProfile):
            found: Profile | MessageCosts = profile_of(self.model, need, answer.ranks)
        else:
            nothing = {name: [0.0] for name in ("sizes", "send", "receive", "delay", "reduce", "threads")}
            found = converted({**nothing, **answer.ranks[0]}, MessageCosts)
        self._set(need, found)
        self._measurements.put(self._key(need), found)
        self.num_measured += 1
        if answer.others is not None and answer.others > BUSY:
            self._disturbed.append((answer.others, self._words(need)))

    def task(self, need: NeededProfile | NeededMessages) -> Task:
        """What ranks are asked to do for it."""
        text = f"measuring {self._words(need)}"
        if isinstance(need, NeededMessages):
            return {"do": "transfer", "text": text, "steps": max(3, round(12 * self._seconds))}
        return {
            "do": "layers",
            "text": text,
            "settings": dataclasses.asdict(self._settings),
            "microbatch_size": need.microbatch_size,
            "recompute": need.recompute,
            "seconds": self._seconds,
            "part": self.model.part,
            "num_sharing": need.num_sharing,
        }

    @property
    def notices(self) -> list[str]:
        """What the user should know."""
        found = []
        if self._settings.device != "cpu" and any(num_ranks > 1 for num_ranks in self.transfers):
            found.append(
                "messages and sums of gradients were timed between CPU ranks, not between GPUs; --verify times whole "
                "steps as they run"
            )
        if self._disturbed:
            busiest = max(others for others, _ in self._disturbed)
            first, more = self._disturbed[0][1], len(self._disturbed) - 1
            and_more = f" and {more} more" if more else ""
            found.append(
                f"other programs kept up to {busiest:.1f} cores busy while {first}{and_more} "
                f"{'were' if more else 'was'} measured; delete {self._measurements.folder} to measure again"
            )
        return found

    def _set(self, need: NeededProfile | NeededMessages, value: Profile | MessageCosts) -> None:
        if isinstance(need, NeededProfile) and isinstance(value, Profile):
            self.profiles[need] = value
        elif isinstance(value, MessageCosts):
            self.transfers[need.num_parallel] = value

    def _words(self, need: NeededProfile | NeededMessages) -> str:
        num_ranks = need.num_parallel
        if isinstance(need, NeededMessages):
            return f"messages between {num_ranks} ranks" if num_ranks > 1 else "the runtime alone"
        words = [self.model.name, f"microbatches of {need.microbatch_size}"]
        words.append("1 rank" if num_ranks == 1 else f"{num_ranks} ranks at a time")
        words += ["recompute"] if need.recompute else []
        words += [f"embedding and head shared by {need.num_sharing}"] if need.num_sharing > 1 else []
        return ", ".join(words)

    def _key(self, need: NeededProfile | NeededMessages) -> dict[str, Any]:
        """Everything that the numbers of a measurement depend on."""
        settings = self._settings
        machine = {
            "version": VERSION,
            "device": device_name(settings),
            "torch": torch.__version__,
            "threads": self.threads,
            **dataclasses.asdict(need),
        }
        if isinstance(need, NeededMessages):
            return {**machine, "what": "transfer"}
        return {
            **machine,
            "what": "layers",
            "model": self.model.digest,
            "precision": settings.precision,
            "optimizer": settings.optimizer,
            "optimizer_options": dict(settings.optimizer_options),
            "clip": settings.clip > 0,
        }


def prepare_together(wanted: Sequence[tuple[Meter, Sequence[NeededProfile]]], num_ranks: Sequence[int] = ()) -> None:
    """Finds or measures profiles of several models, and by the first of their meters messages of so many ranks (1 for
    what one rank alone costs). Processes are started once for each number of ranks side by side.

    Finished measurements are kept even if the rest is interrupted.

    Raises:
        RanksFailed, TuneError; KeyboardInterrupt.
    """
    first = wanted[0][0]
    needed: list[tuple[Meter, NeededProfile | NeededMessages]]
    needed = [(meter, need) for meter, needs in wanted for need in dict.fromkeys(needs)]
    needed += [(first, NeededMessages(count)) for count in dict.fromkeys(num_ranks)]
    missing = [(meter, need) for meter, need in needed if not meter.knows(need)]
    for parallel in sorted({need.num_parallel for _, need in missing}):
        here = [(meter, need) for meter, need in missing if need.num_parallel == parallel]

        def keep(number: int, answer: WorkerAnswer, here: Any = here) -> None:
            meter, need = here[number]
            meter.keep(need, answer)

        run_job([meter.task(need) for meter, need in here], parallel, first.threads, first.say, keep)


def profile_of(model: TunedModel, need: NeededProfile, answers: Sequence[dict[str, Any]]) -> Profile:
    """The profile from the answers of the ranks: of all layers, or of the two that ranks share. The result for a
    layer that several ranks measured is their mean, and so is that of blocks that are alike.

    Each layer was timed as a stage of its own. The time of an empty stage is subtracted, since it occurs
    once per stage, and that of an update without layers, since it occurs once per step.
    """
    times: dict[tuple[int, str], list[float]] = {}
    sizes: dict[int, dict[str, float]] = {}
    for rank in answers:
        sizes |= {int(index): values for index, values in rank["bytes"].items()}
        for label, value in rank["times"].items():
            layer, kind = label.split()
            times.setdefault((int(layer), kind), []).append(value)
    measured = range(model.num_layers) if need.num_sharing == 1 else (0, model.num_layers - 1)
    overheads = {kind: fmean(times.get((NO_LAYER, kind), [0.0])) for kind in TIMES}
    rows: dict[str, tuple[float, ...]] = {}
    for kind, overhead in overheads.items():
        own = {layer: max(0.0, fmean(times[layer, kind]) - overhead) for layer in measured}
        alike = [own[layer] for layer in model.blocks if layer in own]
        rows[kind] = tuple(fmean(alike) if layer in model.blocks else each for layer, each in own.items())
    for what in (*BYTES, "tensors"):
        rows[what] = tuple(sizes[layer][what] for layer in measured)
    return Profile(
        model=model.name,
        layers=tuple(model.layers[layer] for layer in measured),
        microbatch_size=need.microbatch_size,
        num_parallel=need.num_parallel,
        op_overhead={kind: overheads[kind] for kind in KINDS},
        recompute=need.recompute,
        transient=max(values["transient"] for values in sizes.values()),
        tied=max(float(rank.get("tied", 0.0)) for rank in answers),
        step=fmean(rank["step"] for rank in answers) + overheads["update"],
        num_sharing=need.num_sharing,
        **rows,  # type: ignore[arg-type]
    )
