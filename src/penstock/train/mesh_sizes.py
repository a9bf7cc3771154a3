"""How many processes a run has along each direction of its mesh, checked and in words. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.train.checks import SettingsError, is_schedule_file

if TYPE_CHECKING:
    from penstock.schedule import Schedule
    from penstock.train.settings import Settings


def check_mesh(settings: Settings) -> None:
    """Raises SettingsError for options that exclude replicas, or layers that several processes share."""
    if settings.is_sharded and settings.dp == 1:
        raise SettingsError(
            f"--sharding {settings.sharding} shares state out among replicas, and there is one; add --dp 2, or leave "
            "it out"
        )
    if settings.is_flat:
        return
    if settings.in_process:
        _check_in_process(settings)


def check_ties(schedule: Schedule, tied: Sequence[Sequence[str]]) -> None:
    """Raises SettingsError for a weight of two stages, if one of them could not have the version that it is to
    read.
    """
    if not tied or schedule.num_stages == 1:
        return
    # Here, for sizes need no torch.
    from penstock.runtime.compatibility import FeatureCombination, RuntimeFailure, require_compatible

    tie = {"embedding and head": [0, schedule.num_stages - 1]}
    try:
        require_compatible(FeatureCombination(schedule, sharding="none", tied=tie))
    except RuntimeFailure as error:
        raise SettingsError(str(error).replace("untie them", "give --no-tied")) from None


def _check_in_process(settings: Settings) -> None:
    if settings.tp > 1:
        raise SettingsError(f"--tp {settings.tp} shares layers out among processes; leave out --in-process")
    if settings.adapt:
        raise SettingsError(
            "over a mesh --adapt measures links between processes, and here is one; leave out --in-process"
        )
    if settings.is_sharded:
        raise SettingsError(
            f"--sharding {settings.sharding} shares state out among processes; leave it out, or --in-process"
        )
    if settings.is_asynchronous:
        raise SettingsError(
            f"in one process one pipeline runs the microbatches of all {settings.dp} replicas, and the updates of "
            f"{settings.schedule} would come between other ones; leave out --in-process"
        )
    if is_schedule_file(settings.schedule):
        raise SettingsError(
            f"in one process one pipeline runs the microbatches of all {settings.dp} replicas, and "
            f"{settings.schedule} is for those of one; leave out --in-process"
        )


def mesh_words(settings: Settings) -> str:
    """`4 ranks`, or `2 ranks x 2 replicas x 2 shards`."""
    parts = [f"{settings.ranks} ranks"]
    if settings.dp > 1:
        parts.append(f"{settings.dp} replicas")
    if settings.tp > 1:
        parts.append(f"{settings.tp} shards")
    return " x ".join(parts)


def share_out(ranks: int | None, dp: int, tp: int, world: int) -> int:
    """The ranks of a pipeline if a launcher has started `world` processes; `ranks` if they are given.

    Raises:
        SettingsError: sizes that do not multiply to `world`.
    """
    if ranks is None and world % (dp * tp) == 0 and world:
        return world // (dp * tp)
    if ranks is not None and ranks * dp * tp == world:
        return ranks
    sizes = [("pp", ranks), ("dp", dp), ("tp", tp)]
    told = " x ".join(f"{name} {size}" for name, size in sizes if size is not None)
    product = (ranks or 1) * dp * tp
    made = f"is {product}" if ranks is not None else f"is {product}, and pp a whole number of times that"
    raise SettingsError(
        f"{told} {made}; {world} processes were started: start {product}, or give sizes whose product is {world}"
    )
