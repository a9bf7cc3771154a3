"""Profiles as a file: `penstock tune --profile-only --out` writes them, and one can write them by hand.

    {"format": "penstock-profile", "version": 2, "profiles": [...], "transfers": {"1": {...}, "2": {...}}}

    {"f": [1, 4, 4, 2], "i": [1, 5, 5, 2], "w": [0, 3, 3, 2], "weight": [...]}    one entry per layer, for one sample

In version 1 profiles have no `tensors`, and transfers nothing `per_tensor`.

The second form gives a profile of every microbatch size. Everything grows with the number of samples, except weights
and the optimizer's state. `b` is i + w and bytes are 0 unless given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.formats.profile import FORMAT, VERSION
from penstock.tune.errors import TuneError
from penstock.tune.profile import BYTES, MessageCosts, Profile

_A_SAMPLE = ("f", "i", "w", "b", "activation", "held", "output")
_A_MODEL = ("weight", "state", "update")


@dataclass(frozen=True)
class CostsFile:
    """The content of a file.

    Attributes:
        profiles: by (microbatch size, ranks side by side, recompute); empty if the file is for one sample.
        transfers: by number of ranks.
        a_sample: the rows for one sample, or None.
    """

    path: str
    profiles: Mapping[tuple[int, int, bool], Profile]
    transfers: Mapping[int, MessageCosts]
    a_sample: Mapping[str, Sequence[float]] | None = None

    @property
    def model(self) -> str:
        return next(iter(self.profiles.values())).model if self.profiles else Path(self.path).stem

    @property
    def microbatch_sizes(self) -> list[int] | None:
        """The sizes for which the file has profiles; None for all."""
        return sorted({size for size, _, _ in self.profiles}) if self.a_sample is None else None

    @property
    def has_recompute(self) -> bool:
        return any(recompute for _, _, recompute in self.profiles)

    def profile(self, microbatch_size: int, num_parallel: int, recompute: bool) -> Profile | None:
        """The profile for a size, None if there is none; with as many ranks side by side as the file has one for."""
        if self.a_sample is not None:
            return None if recompute else self._scaled(microbatch_size, num_parallel)
        fits = [n for size, n, again in self.profiles if (size, again) == (microbatch_size, recompute)]
        if not fits:
            return None
        nearest = max((n for n in fits if n <= num_parallel), default=min(fits))
        return self.profiles[microbatch_size, nearest, recompute]

    def transfer(self, num_ranks: int) -> MessageCosts | None:
        """What messages cost among so many ranks, if the file says it."""
        if not self.transfers:
            return None
        nearest = max((n for n in self.transfers if n <= num_ranks), default=min(self.transfers))
        return self.transfers[nearest]

    def _scaled(self, size: int, num_parallel: int) -> Profile:
        given = self.a_sample or {}
        num_layers = len(given["f"])
        row = {name: [value * size for value in given[name]] for name in _A_SAMPLE if name in given}
        row |= {name: list(given[name]) for name in _A_MODEL if name in given}
        for name in (*BYTES, "update"):
            row.setdefault(name, [0.0] * num_layers)
        row.setdefault("b", [i + w for i, w in zip(row["i"], row["w"], strict=True)])
        return Profile(
            model=self.model,
            layers=[f"layer {number}" for number in range(num_layers)],
            microbatch_size=size,
            num_parallel=num_parallel,
            f_split=row["f"],
            source=self.path,
            **row,  # type: ignore[arg-type]
        )


def to_json(profiles: Sequence[Profile], transfers: Mapping[int, MessageCosts]) -> str:
    """The file's text."""
    value = {
        "format": FORMAT,
        "version": VERSION,
        "profiles": [profile.to_json() for profile in profiles],
        "transfers": {str(num_ranks): transfer.to_json() for num_ranks, transfer in transfers.items()},
    }
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def load_costs_file(path: str) -> CostsFile:
    """Reads a file. Raises TuneError, which names the file, the field and what it should hold."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TuneError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise TuneError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TuneError(f"{path}: a JSON object is needed, like penstock tune --profile-only --out writes")
    return _profiles(path, value) if "profiles" in value else _rows(path, value)


def _profiles(path: str, value: Mapping[str, Any]) -> CostsFile:
    version = value.get("version")
    if value.get("format") != FORMAT or not isinstance(version, int) or isinstance(version, bool):
        raise TuneError(f'{path}: "format": "{FORMAT}" and a version are needed')
    if not 1 <= version <= VERSION:
        raise TuneError(f"{path} is in version {version}, this Penstock reads up to {VERSION}; upgrade it")
    given, transfers = value["profiles"], value.get("transfers", {})
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise TuneError(f"{path}: profiles are a list with at least one object")
    if not isinstance(transfers, dict) or not all(
        key.isdigit() and isinstance(each, dict) for key, each in transfers.items()
    ):
        raise TuneError(f"{path}: transfers are an object from numbers of ranks to objects")
    profiles = [Profile.from_json(each, f"{path}, profile {number}") for number, each in enumerate(given)]
    if len({(profile.model, tuple(profile.layers)) for profile in profiles}) > 1:
        raise TuneError(f"{path}: its profiles are of several models; make one file per model")
    return CostsFile(
        path,
        {(each.microbatch_size, each.num_parallel, each.recompute): each for each in profiles},
        {int(key): MessageCosts.from_json(each, f"{path}, transfer {key}") for key, each in transfers.items()},
    )


def _rows(path: str, value: Mapping[str, Any]) -> CostsFile:
    known = (*_A_SAMPLE, *_A_MODEL)
    if unknown := sorted(set(value) - set(known)):
        raise TuneError(f"{path}: unknown field {unknown[0]!r}; layers have {', '.join(known)}")
    if missing := [name for name in ("f", "i", "w") if name not in value]:
        raise TuneError(f"{path}: field {missing[0]!r} is missing: f, i and w are needed, one entry per layer")
    for name in value:
        if not isinstance(value[name], list) or not value[name]:
            raise TuneError(f"{path}: {name} is {value[name]!r}; give a list with one number per layer")
        if len(value[name]) != len(value["f"]):
            raise TuneError(f"{path}: {name} has {len(value[name])} entries and f has {len(value['f'])}")
        for layer, number in enumerate(value[name]):
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < float("inf"):
                raise TuneError(f"{path}: {name}[{layer}] is {number!r}; give a finite number of at least 0")
    return CostsFile(path, {}, {}, dict(value))
