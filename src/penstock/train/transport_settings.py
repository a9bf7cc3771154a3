"""The part of a run's settings that says how messages travel and how the run adapts, on any device."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cost import CostError, Costs
from penstock.cost.over_time import read_quantity
from penstock.train.checks import SettingsError, refuse_options

if TYPE_CHECKING:
    from penstock.runtime.transport.choose import DelegateOptions

BASE = "host", "gloo", "direct"
"""Transports whose single links may be delegated."""
ROUTES = *BASE, "delegate", "nccl"
"""Those of a run with real compute."""
STORES = re.compile(r"(rediss?|tcp)://\S+")
SIZES = {f"{prefix}B": size for prefix, size in (("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))} | {
    f"{prefix}iB": size for prefix, size in (("K", 2.0**10), ("M", 2.0**20), ("G", 2.0**30), ("T", 2.0**40))
}


@dataclass(frozen=True)
class TransportSettings:
    """How messages travel, and whether the run measures links and adapts to them.

    Attributes:
        transport: see `ROUTES`. link_depth: most messages under way on a link; None: 2 if it is direct,
            otherwise no limit.
        delegates: processes for each direction and kind of a delegated link; None: chosen by the measured rates.
        interfaces: of this host, names or addresses separated by commas, the preferred one first. If one fails,
            delegated messages use the next. None: see `DelegateOptions`.
        adapt: change schedule, dispatch and delegated links if that is faster over the measured links.
        store: redis://HOST:PORT or tcp://HOST:PORT for the ranks' reports; None: the job's own.
        host_memory: how much may wait in each host's memory while a link is delegated: activations, or bytes.
    """

    transport: str = "host"
    link_depth: int | None = None
    delegates: int | None = None
    interfaces: str | None = None
    adapt: bool = False
    store: str | None = None
    host_memory: str | None = None

    def check_transport(self) -> None:
        """Raises SettingsError for options that exclude each other."""
        if not self.may_delegate:
            why = f"delegates are for --transport delegate or --adapt, not for {self.transport}"
            refuse_options(self, ("delegates", "interfaces"), why)
        for name in ("store", "host_memory"):
            if getattr(self, name) is not None and not self.adapt:
                raise SettingsError(f"{name} is for a run that adapts; add --adapt")
        if self.adapt and self.transport not in BASE:
            raise SettingsError(
                f"--adapt delegates single links of --transport {' or '.join(BASE)}, not of {self.transport}"
            )
        if self.store is not None and STORES.fullmatch(self.store) is None:
            from penstock.runtime.adapt.store import without_password  # here, for it imports torch

            shown = without_password(self.store)
            raise SettingsError(f"store {shown!r}: write redis://HOST:PORT or tcp://HOST:PORT")
        host_memory_of(self.host_memory, None)

    @property
    def may_delegate(self) -> bool:
        """Whether links may use delegates: all of them, or single ones if that is faster."""
        return self.transport == "delegate" or self.adapt

    def delegate_options(self) -> DelegateOptions:
        """How delegates carry messages. Imports torch."""
        from penstock.runtime.transport.choose import DelegateOptions

        found = DelegateOptions()
        if self.delegates is not None:
            found = replace(found, num=self.delegates, most=self.delegates)
        if self.interfaces is not None:
            found = replace(found, interfaces=tuple(filter(None, self.interfaces.split(","))))
        return found


def host_memory_of(text: str | None, costs: Costs | None) -> float:
    """Host memory in the units of the costs: `4` is activations of the largest stage, `8GB` is bytes.

    Without costs a stage's activation counts as 1.

    Raises:
        SettingsError: no number of at least 0, or bytes where the activations' bytes are not known.
    """
    if text is None:
        return 0.0
    largest = 1.0 if costs is None else max(costs.activation)
    try:
        return read_quantity(text, {"": 1.0}) * largest
    except CostError:
        pass
    size = read_size("host_memory", text, "activations, like 4, or ")
    if costs is not None and largest <= 1024:
        raise SettingsError(
            f"host_memory {text}: how many bytes an activation has is not known here; give activations, like 4"
        )
    return size


def read_size(name: str, text: str, or_else: str = "") -> float:
    """Reads `8GB`, `8GiB` or `1000B`. Raises SettingsError."""
    try:
        return read_quantity(text, SIZES)
    except CostError:
        raise SettingsError(f"{name} {text!r}: give {or_else}bytes, like 8GB or 8GiB") from None
