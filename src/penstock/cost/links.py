"""Links between ranks: how late messages arrive.

Links({(0, 1): 20.0})                     messages between ranks 0 and 1 arrive 20 ms late, both ways
Links({(0, 1): 20.0, (1, 0): 0.0})        from 0 to 1 alone
Links({(0, 1): "latency:30ms+loss:1%"})   any condition, in the language of `cost.conditions`
Links.parse("0:1=20 2:3=occupancy:5ms")   the same as a text
Links(default=0.5)                        every link
"""

from __future__ import annotations

import math
import re
import reprlib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real

from penstock.cost.conditions import Constant, LinkCondition, LinkQueue, MessagePassage
from penstock.cost.errors import CostError
from penstock.unknown_names import refuse_unknown

_LINK = re.compile(r"(?P<a>[0-9]{1,9}):(?P<b>[0-9]{1,9})=(?P<rest>.+)", re.DOTALL)
Given = float | str | LinkCondition
"""What one link may be given as: milliseconds of latency, a text, or a condition."""


@dataclass(frozen=True, init=False, repr=False)
class Links:
    """How late messages between ranks arrive: a delay in milliseconds, or a condition, per link.

    `Links({(0, 1): 20.0})` sets both directions between ranks 0 and 1. Each direction has a queue of its own. At any
    moment both have the same latency, occupancy and bandwidth. To give the directions different conditions, name both
    (0, 1) and (1, 0). A plain number is pure latency: any number of messages may be on their way at once.

    Args:
        conditions: for a pair of ranks a delay in ms, a text like "latency:30ms+loss:1%", or a `LinkCondition`.
        default: the condition of all other links.
        base: ms that the network itself adds to every message, on any link.

    Attributes:
        conditions: the `LinkCondition` of each link that was given.
        default: the condition of all other links. None: their messages arrive at once.

    Raises:
        CostError: a negative or non-finite delay, a text that is not a condition, or a link that does not name two
            different ranks.

    Examples:
        >>> import penstock as ps
        >>> links = ps.Links({(0, 1): 20.0}, default=1.0)
        >>> links.delay(1, 0), links.delay(1, 2)
        (20.0, 1.0)
        >>> links == ps.Links.parse("0:1=latency:20ms", default=1.0)
        True
    """

    conditions: Mapping[tuple[int, int], LinkCondition] = field(default_factory=dict)
    default: LinkCondition | None = None
    base: float = 0.0

    @refuse_unknown(CostError)
    def __init__(
        self,
        conditions: Mapping[tuple[int, int], Given] | None = None,
        default: Given | None = None,
        base: float = 0.0,
    ) -> None:
        given = {} if conditions is None else conditions
        if not isinstance(given, Mapping):
            raise CostError(f"links are {type(given).__name__}: give them by link, like {{(0, 1): 20.0}}")
        found: dict[tuple[int, int], LinkCondition] = {}
        for link, value in given.items():
            if not (isinstance(link, tuple) and len(link) == 2 and all(isinstance(rank, Integral) for rank in link)):
                raise CostError(f"link {link!r}: name it by its two ranks, like (0, 1)")
            if link[0] == link[1]:
                raise CostError(f"link {link[0]}:{link[1]} joins a rank to itself; name two ranks")
            found[int(link[0]), int(link[1])] = _condition(f"the delay of link {link[0]}:{link[1]}", value)
        nothing = default is None or (isinstance(default, Real) and default == 0)
        if not isinstance(base, Real) or not 0 <= float(base) < math.inf:
            raise CostError(f"a base of {base!r} ms: give a number of at least 0")
        object.__setattr__(self, "conditions", found)
        object.__setattr__(self, "default", None if nothing else _condition("the default delay", default))
        object.__setattr__(self, "base", float(base))

    def __hash__(self) -> int:
        return hash((frozenset(self.conditions.items()), self.default, self.base))

    def __repr__(self) -> str:
        shown = reprlib.Repr()
        shown.maxdict, shown.maxstring = 6, 160
        parts = (
            [shown.repr({link: _plain(each) for link, each in self.conditions.items()})] if self.conditions else []
        )
        if self.default is not None:
            parts.append(f"default={shown.repr(_plain(self.default))}")
        if self.base:
            parts.append(f"base={self.base!r}")
        return f"Links({', '.join(parts)})"

    @classmethod
    def parse(cls, texts: str | Iterable[str], default: Given | None = None) -> Links:
        """Reads conditions such as `0:1=latency:30ms`, one per link. A single string may hold several, with blanks
        between them.

        Raises:
            CostError: names the text and the rule that it breaks.
        """
        found: dict[tuple[int, int], LinkCondition] = {}
        for text in shlex.split(texts) if isinstance(texts, str) else texts:
            match = _LINK.fullmatch(text)
            if match is None:
                raise CostError(f"link {text!r}: write RANK:RANK=CONDITION, like 0:1=20 or 0:1=latency:30ms+loss:1%")
            pair = int(match["a"]), int(match["b"])
            if pair in found:
                raise CostError(f"link {text!r}: link {pair[0]}:{pair[1]} is given twice")
            try:
                found[pair] = LinkCondition.parse(match["rest"])
                cls({pair: found[pair]})
            except CostError as error:
                raise CostError(f"link {text!r}: {error}") from None
        return cls(found, default)

    @classmethod
    def of(cls, links: Links | None) -> Links:
        """The same links, or empty ones for None. Raises CostError for any other type."""
        if links is not None and not isinstance(links, Links):
            raise CostError(f"links are {type(links).__name__}: give ps.Links, like ps.Links({{(0, 1): 20.0}})")
        return cls() if links is None else links

    def __str__(self) -> str:
        return shlex.join(self.texts())

    def texts(self) -> list[str]:
        """One text per link, as `parse` reads it. The default is not included."""
        return [f"{a}:{b}={condition}" for (a, b), condition in self.conditions.items()]

    @cached_property
    def is_constant(self) -> bool:
        """Whether every link has a constant latency and nothing else."""
        return not self.base and all(
            each is None or each.is_latency for each in (self.default, *self.conditions.values())
        )

    def require_constant(self, what: str) -> None:
        """Raises CostError, naming a link, unless all links have constant latencies. `what` names what needs that."""
        if self.is_constant:
            return
        wrong = next((text for text, each in zip(self.texts(), self.conditions.values()) if not each.is_latency), "")
        wrong = wrong or (f"base={self.base:g}ms" if self.base else f"default={self.default}")
        raise CostError(
            f"{what} needs delays that do not change, such as 0:1=latency:20ms, but the links have {wrong}; "
            "give a typical delay, and simulate the result under the real conditions"
        )

    @cached_property
    def delays(self) -> dict[tuple[int, int], float]:
        """The milliseconds of each link, if all are constant. Raises CostError if not."""
        self.require_constant("a table of delays")
        return {link: each.latency.at(0.0, "") for link, each in self.conditions.items()}

    def delay(self, source: int, target: int) -> float:
        """Milliseconds from the end of an op on `source` to the arrival of its message on `target`.

        Raises:
            CostError: the links are not constant, so the delay depends on when a message is sent.
        """
        self.require_constant("a table of delays")
        condition = self.named(source, target)[1]
        return 0.0 if condition is None else condition.latency.at(0.0, "")

    def named(self, source: int, target: int) -> tuple[str, LinkCondition | None]:
        """The name of the link from `source` to `target`, as it was given, and its condition."""
        for a, b in ((source, target), (target, source)):
            if (a, b) in self.conditions:
                return f"{a}:{b}", self.conditions[a, b]
        return f"{min(source, target)}:{max(source, target)}", self.default

    def delay_of(self, source: int, target: int, num_bytes: float, now: float, queue: LinkQueue) -> MessagePassage:
        """When a message of `num_bytes` that is sent at `now` (ms) arrives. See `LinkCondition.delay_of`."""
        name, condition = self.named(source, target)
        if condition is None:
            arrived = max(now + self.base, queue.last_arrival)
            return MessagePassage(now, arrived, LinkQueue(queue.free_at, arrived, queue.num_sent + 1))
        left, arrived, after = condition.delay_of(num_bytes, now, queue, name, f"{source}>{target}")
        return MessagePassage(left, arrived + self.base, after)

    def check_ranks(self, num_ranks: int) -> None:
        """Raises CostError for a link that names a rank outside 0 to `num_ranks - 1`."""
        for a, b in self.conditions:
            if not (0 <= a < num_ranks and 0 <= b < num_ranks):
                raise CostError(f"link {a}:{b}: ranks go from 0 to {num_ranks - 1}")


def _condition(name: str, value: object) -> LinkCondition:
    if isinstance(value, LinkCondition):
        return value
    if isinstance(value, Real) and 0 <= float(value) < math.inf:
        return LinkCondition(Constant(float(value)))
    if isinstance(value, str):
        try:
            return LinkCondition.parse(value)
        except CostError as error:
            raise CostError(f"{name} is {value!r}: {error}") from None
    raise CostError(f"{name} is {value!r}: give milliseconds of at least 0, or a text like 'latency:30ms+loss:1%'")


def _plain(condition: LinkCondition) -> float | str:
    return condition.latency.at(0.0, "") if condition.is_latency else str(condition)


class LinkQueues:
    """The queues of all directions of a run, through which the simulator and the transports pass messages.

    They live as long as this object, so several runs in a row can share them.

    Args:
        links: their conditions.
        free_at: when directions begin to carry messages (ms); all others carry them from the start.
    """

    def __init__(self, links: Links, free_at: Mapping[tuple[int, int], float] | None = None) -> None:
        self.links = links
        self._queues = {way: LinkQueue(free_at=ms) for way, ms in (free_at or {}).items()}

    def arrival(self, source: int, target: int, num_bytes: float, now: float, in_turn: bool = False) -> float:
        """Passes a message through its queue and returns the moment of its arrival (ms). `in_turn`: the next message
        of this direction leaves only then.
        """
        condition = self.links.named(source, target)[1]
        both = condition is not None and condition.half_duplex
        way = (min(source, target), max(source, target)) if both else (source, target)
        queue = self._queues.get(way, LinkQueue())
        passage = self.links.delay_of(source, target, num_bytes, now, queue)
        self._queues[way] = passage.queue._replace(free_at=passage.arrived) if in_turn else passage.queue
        return passage.arrived

    def arrival_in_run(self, source: int, target: int, num_bytes: float, now: float, at: float) -> float:
        """The same in the time of a run that began at `at`. The result is rounded, or what a sum leaves over would
        part what happens at one moment, and turn ties.
        """
        return now + round(self.arrival(source, target, num_bytes, now + at) - (now + at), 9)
