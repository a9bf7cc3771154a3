"""Builds a library schedule by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from penstock.library.amdp import amdp
from penstock.library.in_turn import (
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    spectrain,
    vnag,
    xpipe,
)
from penstock.library.modalities import distmm, mllm
from penstock.library.options import whole_number
from penstock.library.two_ways import bitpipe, chimera, dualpipe, dualpipe_v, hanayo, vchimera
from penstock.library.zero_bubble import v_half, v_min, zb, zb_h1, zb_h2, zb_v
from penstock.schedule import Schedule, ScheduleError, check
from penstock.unknown_names import did_you_mean, refuse_unknown

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "zb": zb,
    "v-half": v_half,
    "v-min": v_min,
    "chimera": chimera,
    "hanayo": hanayo,
    "bitpipe": bitpipe,
    "vchimera": vchimera,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
    "distmm": distmm,
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
    "spectrain": spectrain,
    "xpipe": xpipe,
    "vnag": vnag,
    "amdp": amdp,
    "mllm": mllm,
}

MOST_FORWARDS = 10_000_000
"""Forwards of a schedule, over all stages. So many take minutes to build and check, and gigabytes."""

TORCH_NAMES = {
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved-1f1b",
    "gpipe": "gpipe",
    "loopedbfs": "looped-bfs",
    "interleavedzerobubble": 'interleaved-1f1b with backward="split"',
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}
"""The names of schedules in `torch.distributed.pipelining` and TorchTitan, in lower case -> their names here."""

ASYNCHRONOUS = ("pipedream", "pipedream-2bw", "spectrain", "xpipe", "vnag", "amdp")
"""Schedules of a whole run without flushes. They take a `window`; with it, updates are ops of the schedule."""


@refuse_unknown(ScheduleError)
def build(
    name: str, num_ranks: int, num_microbatches: int, max_in_flight: float | None = None, **options: Any
) -> Schedule:
    """Builds a schedule of the library by its name, and checks it.

    Args:
        name: the name of the schedule, such as "1f1b", "zb-v" or "amdp". `penstock show --help` lists all.
        num_ranks: devices of the pipeline.
        num_microbatches: microbatches of a step, over all pipelines together.
        max_in_flight: most stage activations that a rank may hold, each from its F to its B or W. Some schedules
            adapt to this limit. The others are refused if they need more.
        options: further options of the schedule, such as `num_stages` (interleaved-1f1b) or `warmup` (zb).

    Returns:
        The schedule, proved to run.

    Raises:
        ScheduleError: an unknown name (the error suggests similar ones), an unknown option, counts that the schedule
            cannot use or that make more than `MOST_FORWARDS` forwards, or a cap that it exceeds.

    Examples:
        >>> import penstock as ps
        >>> print(ps.build("1f1b", num_ranks=2, num_microbatches=3))
        schedule 1f1b: 2 ranks, 2 stages, 3 microbatches
        pipeline 0: stages on ranks 0 1
        rank 0 | F0 F1 .  B0 F2 B1 .  B2
        rank 1 | .  F0 B0 F1 B1 F2 B2
        >>> ps.build("interleaved-1f1b", 4, 8, num_stages=8).num_stages
        8

    References:
        The gallery and `docs/library.md` name the paper of each schedule.
    """
    if not isinstance(name, str):
        raise ScheduleError(f"a schedule is named by text, got {type(name).__name__}", rule="name")
    if name not in SCHEDULES:
        hint = did_you_mean(name, SCHEDULES, f"there are {', '.join(SCHEDULES)}")
        if (ours := TORCH_NAMES.get(name.lower().removeprefix("schedule"))) is not None:
            hint = f"what torch and TorchTitan call so is {ours} here"
        raise ScheduleError(f"no schedule named {name!r}; {hint}", rule="name")
    for what, count in (("ranks", num_ranks), ("microbatches", num_microbatches)):
        whole_number(name, what, count)
        if count < 1:
            raise ScheduleError(f"{name} needs at least 1 of {what}, got {count}", rule="options")
    stages = options.get("num_stages")
    most_stages = max(num_ranks, stages if isinstance(stages, int) else 0)
    if most_stages * num_microbatches > MOST_FORWARDS:
        most = MOST_FORWARDS // most_stages
        fewer = f"at most {most} microbatches" if most else "fewer stages"
        raise ScheduleError(
            f"{name} with {most_stages} stages and {num_microbatches} microbatches has "
            f"{most_stages * num_microbatches} forwards, and a schedule of the library at most {MOST_FORWARDS}; "
            f"give {fewer}",
            rule="options",
        )
    known = _options_of(name)
    options = {key: value for key, value in options.items() if value is not None}
    if max_in_flight is not None and "max_in_flight" in known:
        options["max_in_flight"] = max_in_flight
    if unknown := [key for key in options if key not in known]:
        takes = f"takes {', '.join(known)}" if known else "takes no options"
        others = [other for other in SCHEDULES if unknown[0] in _options_of(other)]
        have = "has" if len(others) == 1 else "have"
        elsewhere = f". Of the library, {', '.join(others)} {have} it" if others else ""
        raise ScheduleError(f"{name} has no option {unknown[0]!r}; it {takes}{elsewhere}", rule="options")
    schedule = SCHEDULES[name](num_ranks, num_microbatches, **options)
    check(schedule, max_in_flight=max_in_flight)
    return schedule


def buildable(names: Iterable[str], num_ranks: int, num_microbatches: int) -> Iterator[tuple[str, Schedule]]:
    """Builds the named library schedules one by one; yields each that exists for these counts, with its name."""
    for name in names:
        with suppress(ScheduleError):
            yield name, build(name, num_ranks, num_microbatches)


def _options_of(name: str) -> list[str]:
    """The options of a schedule of the library, besides its ranks and microbatches."""
    return list(inspect.signature(SCHEDULES[name]).parameters)[2:]


def options_of_each(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options that each schedule takes, by the schedule's name.

    Args:
        names: names of schedules. One that is not in the library takes no options.
        options: options by name, for all of the schedules.

    Raises:
        ScheduleError: an option that none of the schedules takes.

    Examples:
        >>> from penstock.library import options_of_each
        >>> options_of_each(["1f1b", "amdp"], {"max_mismatch": 1})
        {'1f1b': {}, 'amdp': {'max_mismatch': 1}}
    """
    takes = {name: _options_of(name) for name in names if name in SCHEDULES}
    for key in options:
        if not any(key in each for each in takes.values()):
            others = [name for name in SCHEDULES if key in _options_of(name)]
            hint = f"it is one of {', '.join(others)}" if others else "no schedule of the library has it"
            raise ScheduleError(f"--option {key}: none of {', '.join(names)} takes it; {hint}", rule="options")
    return {name: {key: value for key, value in options.items() if key in each} for name, each in takes.items()}
