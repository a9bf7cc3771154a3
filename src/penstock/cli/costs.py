"""Costs and links as verbs take them: the same options everywhere, and what they come to.

--f 10 --i 10 --w 10,12        ms, for all stages alike or one per stage
--costs gpt2-14b               a preset, or a file of costs or of a profile
--link 0:1=20 --link 2:3=latency:30ms+loss:1%
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import typer

import penstock as ps
from penstock.cli.failure import Misuse
from penstock.cli.options import limits_of, numbers
from penstock.cli.output import plural
from penstock.cost.presets import PRESETS, is_preset
from penstock.engine.tolerance import is_within
from penstock.formats.costs import are_of_a_model, read_costs
from penstock.schedule.op import KINDS, RECOMPUTE
from penstock.schedule.placement import num_ranks_of
from penstock.simulation.memory_footprint import in_bytes as size_words
from penstock.train.options import COSTS, setting

COSTS_SOURCE = (
    f"All costs, of a preset or a file: {', '.join(PRESETS)}, with options as in gpt2-7b:device=a100; a file, "
    'like {"f": 10, "i": 10, "w": [10, 12]}; or one that penstock tune --profile-only wrote.'
)
CostsSource = Annotated[str | None, typer.Option("--costs", metavar="NAME|FILE", help=COSTS_SOURCE)]
LINK = (
    "What messages between A and B meet, both ways unless B:A is given: a delay in ms, 0:1=20, or "
    "0:1=latency:30ms+occupancy:5ms+bandwidth:1GB/s+loss:1%; default=0.2 is the delay of all other links; may be "
    "repeated."
)
DEFAULT = "default="
"""How --link says the delay of all other links, in ms."""

MEMORY_LIMIT = (
    "Most that a rank may hold. With a unit, as 35GiB, it counts everything. A plain number, as 14, counts "
    "activations alone, as the costs have them: those of a stage (--placement all: of a part) are 1 where nothing is "
    "said. plan, simulate and emulate also take one per rank: 7,5; tune needs a unit."
)
MemoryLimit = Annotated[str | None, typer.Option("--memory-limit", metavar="SIZE", help=MEMORY_LIMIT)]

UNSIZED = "messages have 0 bytes; give --cost message_bytes=2e6, or message_bytes in a file for --costs"
"""What is said where a link has a bandwidth and no message has a size."""

ROWS = ("f", "i", "w", "b", "activation", "message_bytes")
"""What is given one per stage."""
OTHERS = ("b", "activation", "message_bytes", "freed_by_input", "lengths")
"""The costs that --cost takes; besides, the time of a kind of op in capitals."""


@dataclass(frozen=True)
class GivenCosts:
    """Costs as they were typed; None where they were not.

    Attributes:
        others: what --cost gives, some of OTHERS. source: of all costs, --costs. of: what an entry is for, in words.

    Raises:
        Misuse: a name that is none of OTHERS and no kind of op in capitals.
    """

    f: str | None = setting(
        None,
        "Time of a forward: ms, or one per stage (--placement all: per part), as 10,12. [1 for each rank's share of "
        "the model]",
        COSTS,
        metavar="MS",
    )
    i: str | None = setting(None, "Input-gradient half of the backward: ms. [1 for each share]", COSTS, metavar="MS")
    w: str | None = setting(None, "Weight-gradient half: ms. [1 for each share]", COSTS, metavar="MS")
    others: Mapping[str, Any] = setting(
        {},
        "Another cost, repeatable: b=20 (ms of a full backward, or [20,24] per stage; i + w if not given), "
        "activation=4 (memory that a forward keeps for its backward, in any unit), "
        "freed_by_input=0.5 (the share of it that I frees), message_bytes=2e6, lengths=[512,2048] (of each "
        "microbatch; times, activations and messages are in proportion), or COMPRESS=3 (ms of an op of your own, or "
        "[3,4] per stage).",
        COSTS,
        flags=("--cost",),
        metavar="KEY=VALUE",
        is_repeated=True,
    )
    source: str | None = setting(None, COSTS_SOURCE, COSTS, flags=("--costs",), metavar="NAME|FILE")
    of: str = "stage"

    def __post_init__(self) -> None:
        if unknown := self.others.keys() - {*OTHERS, *self.own_kinds}:
            raise Misuse(f"--cost {min(unknown)}: there are {', '.join(OTHERS)}, and KIND=MS for ops of your own")

    def _text(self, name: str) -> str | None:
        """A cost as it was typed: `10`, or `10,12` for one per stage; None where it was not."""
        value = self.others.get(name, getattr(self, name, None))
        return ",".join(map(str, value)) if isinstance(value, list) else None if value is None else str(value)

    def read(self, num_ranks: int, placement: ps.Placement, num_microbatches: int) -> ps.Costs:
        """The costs of a placement's stages; those of `ps.Costs.assumed` where nothing is said.

        Raises:
            Misuse: costs given twice, or lists of another length than there are stages or microbatches.
            CostError: costs that make no sense, an unknown preset, a damaged file.
        """
        costs = self._even(num_ranks, placement)
        own = {kind: self._row(kind, self._text(kind), placement.num_stages) for kind in self.own_kinds}
        own_ops = [(kind, stage, ms) for kind, row in own.items() for stage, ms in enumerate(row)]
        costs = costs.with_other({(k, stage): (ms, costs.memory_change(k, stage)) for k, stage, ms in own_ops})
        lengths = self._text("lengths")
        if lengths is None:
            for count in _counts_of_microbatches(costs):
                _require_one_each(f"uneven of --costs {self.source}", count, num_microbatches)
            return costs
        if costs.factors:
            raise Misuse(
                f"--costs {self.source} and --cost lengths both say how microbatches differ; use one of them"
            )
        given = numbers("--cost lengths", lengths)
        _require_one_each("--cost lengths", len(given), num_microbatches)
        return replace(costs, uneven=ps.cost.Uneven.lengths(given))

    def _even(self, num_ranks: int, placement: ps.Placement) -> ps.Costs:
        num_stages = placement.num_stages
        texts = {name: self._text(name) for name in ROWS}
        if self.source is None:
            rows: dict[str, Any] = {name: self._row(name, text, num_stages) for name, text in texts.items()}
            assumed = ps.Costs.assumed(num_ranks, placement)
            rows |= {name: getattr(assumed, name) for name in self._not_given}
            if self._halves:
                rows |= {name: [ms / 2 for ms in rows["b"]] for name in ("i", "w")}
            if (freed := self._text("freed_by_input")) is not None:
                rows["freed_by_input"] = self._row("freed_by_input", freed, 1)[0]
            return ps.Costs(**rows)
        self._require_one_source()
        if placement.shared and self.of_model() is not None:
            raise Misuse(
                f"--costs {self.source} is cut into stages of one rank each, and does not say what a rank's part of "
                f"a shared stage takes; give a file of costs with one entry per {self.of}, or a schedule and a "
                "--placement without shared stages"
            )
        return read_costs(self.source, num_stages)

    def of_model(self) -> Callable[[int], ps.Costs] | None:
        """The costs by the number of stages that a model is cut into; None where they are of no model.

        Raises:
            Misuse: costs given twice, or a speed of links, which tune alone takes.
        """
        try:
            if self.source is None or not are_of_a_model(self.source):
                return None
        except (OSError, ValueError):  # what is wrong with it, `read` says
            return None
        self._require_one_source()
        return partial(read_costs, self.source)

    def _require_one_source(self) -> None:
        given = [name for name in (*ROWS, "freed_by_input") if self._text(name) is not None]
        if given:
            raise Misuse(f"--costs {self.source} and {_option(given[0])} both give costs; use one of them")
        if is_preset(self.source or "") and "link_gb=" in (self.source or ""):
            raise Misuse(
                f"--costs {self.source}: link_gb is for penstock tune, and here messages take what --link says; "
                "leave it out, and give each link its bandwidth, like --link 0:1=bandwidth:25GB/s"
            )

    def activations(self, text: str | None, costs: ps.Costs, placement: ps.Placement) -> Any:
        """--memory-limit as a limit of activations; of bytes, what weights, gradients and optimizer state leave."""
        limits, in_bytes = limits_of("--memory-limit", text, num_ranks_of(placement))
        if limits is None or not in_bytes:
            return limits
        self.require_weights(text, costs)
        return list(ps.simulation.room_for_activations(placement, costs, limits))

    def require_weights(self, text: str | None, costs: ps.Costs) -> None:
        """Raises Misuse where a --memory-limit of bytes is given over costs that do not say what weights take."""
        if not costs.weight_bytes:
            raise Misuse(
                f"--memory-limit {text} counts all that a rank holds, and these costs do not say what weights take; "
                f"give a number without a unit, which counts activations alone (those of a {self.of} are 1 where "
                "nothing is said), or --costs with a preset or a profile"
            )

    def assumed(self, num_ranks: int, placement: ps.Placement) -> str | None:
        """What `read` had to assume, in words, and the options that say otherwise; None where all was given."""
        if self.source is not None:
            return None
        said = []
        if names := self._not_given:
            each = ps.Costs.assumed(num_ranks, placement).f[0]
            kinds = " = ".join(name.upper() for name in names)
            said.append(f"{kinds} = {each:.4g} ms per {self.of}, 1 ms for each rank's share of the model")
        if self._halves:
            said.append("I = W = half of B")
        options = [_option(name) for name in (*names, *(("i", "w") if self._halves else ()))]
        return "; ".join([*said, f"give {', '.join(options)} or --costs"]) if said else None

    @property
    def words(self) -> str:
        """The costs as they were typed."""
        if self.source is not None:
            return self.source
        typed = {name: self._text(name) for name in (*ROWS, "freed_by_input", "lengths", *self.own_kinds)}
        return " ".join(f"{_option(name)} {value}" for name, value in typed.items() if value is not None)

    @property
    def own_kinds(self) -> list[str]:
        """The kinds of ops whose times --cost gives."""
        return sorted(filter(str.isupper, self.others))

    @property
    def is_of_stages(self) -> bool:
        """Whether costs are given, and a model of another number of stages has others."""
        typed = any(self._text(name) is not None for name in ROWS)
        return typed or (self.source is not None and not are_of_a_model(self.source))

    @property
    def _halves(self) -> bool:
        """Whether a full backward is given and nothing of its halves."""
        return self._text("b") is not None and self.i is None and self.w is None

    @property
    def _not_given(self) -> tuple[str, ...]:
        """The times of which nothing is said."""
        names = ("f",) if self._halves else ("f", "i", "w")
        return tuple(name for name in names if getattr(self, name) is None)

    def _row(self, name: str, text: str | None, num_stages: int) -> list[float]:
        if text is None:
            return []
        values = numbers(_option(name), text)
        if len(values) not in (1, num_stages):
            raise Misuse(f"{_option(name)} has {len(values)} entries; give one, or one per {self.of}: {num_stages}")
        return values * num_stages if len(values) == 1 else values


def _counts_of_microbatches(costs: ps.Costs) -> set[int]:
    """For how many microbatches there are factors. Those of updates and of ops of your own have other counts."""
    kinds, fields = (*KINDS, RECOMPUTE), ("time", "activation", "message")
    return {len(row) for kind in kinds for what in fields for row in costs.factors.find(what, kind) or ()}


def _require_one_each(name: str, count: int, num_microbatches: int) -> None:
    if count != num_microbatches:
        raise Misuse(f"{name} has {plural(count, 'entry', 'entries')}; give one per microbatch: {num_microbatches}")


def _option(name: str) -> str:
    return f"--{name}" if name in ("f", "i", "w") else f"--cost {name}"


def read_links(texts: list[str], default: float | None = 0.0) -> ps.Links:
    """The links that --link says, and with `default=MS` the delay of all others. Without that they have `default`.

    Raises:
        Misuse: a default that is no number, or two of them.
        CostError: a condition that makes no sense.
    """
    defaults = [text for text in texts if text.startswith(DEFAULT)]
    if len(defaults) > 1:
        raise Misuse(f"--link {' --link '.join(defaults)}: all other links have one delay; give one of them")
    for text in defaults:
        delays = numbers("--link", text.removeprefix(DEFAULT))
        if len(delays) > 1:
            raise Misuse(f"--link {text}: give one delay in ms")
        default = delays[0]
    return ps.Links.parse([text for text in texts if text not in defaults], default)


def unsized_links(costs: ps.Costs, links: ps.Links) -> list[str]:
    """The links whose bandwidth does nothing, because messages have no bytes by these costs; see UNSIZED."""
    if any(costs.message_bytes) or any(costs.update_bytes):
        return []
    return [f"{a}:{b}" for (a, b), condition in links.conditions.items() if condition.bandwidth is not None]


def require_within(text: str | None, timeline: ps.Timeline, held: Callable[[], ps.simulation.Footprint]) -> None:
    """Raises ScheduleError if a rank holds more than --memory-limit: of everything if the limit has a unit, else of
    activations.

    Args:
        held: what `ps.footprint` says, which takes a simulation.
    """
    limits, in_bytes = limits_of("--memory-limit", text, timeline.num_ranks)
    if limits is None:
        return
    totals = held().totals if in_bytes else timeline.peak_activations
    each = limits if isinstance(limits, list) else [limits] * len(totals)
    rank = max(range(len(totals)), key=lambda r: totals[r] - each[r])
    over = totals[rank] - each[rank]
    if over <= 0 or (not in_bytes and is_within(totals[rank], each[rank])):
        return
    words = [size_words(size, 4) if in_bytes else f"{size:.6g} of activations" for size in (totals[rank], over)]
    raise ps.ScheduleError(
        f"rank {rank} holds {words[0]}{', messages included' if in_bytes else ''}, which is {words[1]} more than "
        f"--memory-limit {text}; raise the limit, or ask penstock plan for a schedule that holds less",
        rule="memory",
        rank=rank,
    )
