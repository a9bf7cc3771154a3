"""A recorded run as a schedule with costs, replica by replica: what the planner and the simulator take.

fit = fitted(run, effects)
fit.schedule                        the order that ran, and the library's name for it where it has one
fit.costs(step, replica)            ps.Costs with every op's own time
fit.costs_of(schedule, ...)         what the ops of another schedule, or of another cut, would take
fit.links                           ps.Links: the median of each
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.analyze.causes import Effects
from penstock.analyze.replay import ReplayedRun
from penstock.analyze.step_table import BACKWARDS, StepTable, free_at
from penstock.cost import Costs, Links
from penstock.engine.network import Array
from penstock.formats.traces.run_trace import NONE, Scope, TraceError
from penstock.library.registry import buildable
from penstock.schedule import Op, Placement, Schedule, ScheduleError, check, declare_order, peak_in_flight

NAMED = (
    "1f1b", "gpipe", "zb-h1", "zb-h2", "zb", "zb-v", "interleaved-1f1b", "looped-bfs", "v-half", "v-min", "hanayo",
    "dualpipe-v", "mllm",
)  # fmt: skip
"""Library schedules in which a recorded order is looked up."""
KINDS = "FBIW"


@dataclass(frozen=True, eq=False)
class FittedPipelines:
    """A run's pipelines.

    Attributes:
        schedule: the order of replica 0 in the first step, its microbatches numbered as they came. It has the
            library's name for that order, or "recorded" where there is none.
        links: ms, the median of each link.
        guessed: those of the links whose messages nobody waited for.
        in_flight: the most microbatches that any rank held at once, in activations of one rank's share of the model.
        times: ms of each kind's ops by step, replica, stage and microbatch: (K, D, S, N).
        factors: of microbatches as `effects` has them, by step and replica, numbered as in the schedule: (K, D, N).
        workers: how many times as long as its like each worker takes, by replica and rank, (D, P).
        between: ms from the end of a rank's op to the start of its next that waits for nothing else, by the next
            one's kind.
    """

    schedule: Schedule
    links: Links
    guessed: tuple[tuple[int, int], ...]
    in_flight: float
    times: dict[str, Array]
    factors: Array
    workers: Array
    between: dict[str, float]

    @property
    def num_replicas(self) -> int:
        return len(self.workers)

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.schedule.name

    @property
    def usual_between(self) -> float:
        """Ms from an op's end to the start of the next, the mean over kinds."""
        return float(np.mean(list(self.between.values())))

    def costs(self, step: int, replica: int, scale: Array = 1.0) -> Costs:
        """What each op of a replica took in a step; with a factor for each microbatch, (N,)."""
        return _costs({letter: rows[step, replica] * scale for letter, rows in self.times.items()})

    def even_costs(self) -> Costs:
        """Every op as long as the mean of its kind over stages, replicas and steps."""
        return _costs({letter: np.full(rows.shape[2:], rows.mean()) for letter, rows in self.times.items()})

    def costs_of(
        self,
        schedule: Schedule,
        steps: Array,
        replica: int,
        *,
        layers: Sequence[int] = (),
        cut: Sequence[int] = (),
        input_share: float = 0.5,
        is_first_whole: bool = False,
        with_between: bool = False,
        message_bytes: float = 0.0,
    ) -> Costs:
        """What ops would take in another schedule of the same ranks.

        The stages of the schedule are made of the layers of the recorded ones. Slow workers stay where they are, and
        a rank's share of the model weighs 1.

        Args:
            steps: the step of whose times each microbatch takes its own, (N,), or one step for all.
            layers, cut: how many layers each recorded stage has, and each new one. Without them the recorded stages
                are divided, or put together, in equal parts.
            input_share: of a backward that was recorded whole, the share that I takes.
            is_first_whole: whether the first stage's I does nothing and its W is the whole backward, as in torch.
            with_between: whether ops take the time between ops too.
            message_bytes: of one activation.
        """
        worker, num = self.workers[replica], self.schedule.num_microbatches
        before = worker[list(self.schedule.placement.pipelines[0])][:, None]
        after = worker[list(schedule.placement.pipelines[0])][:, None]
        rows = {kind: each[steps, replica, :, np.arange(num)].T / before for kind, each in self.times.items()}
        rows = _all_kinds(rows, input_share)
        if cut or schedule.num_stages != self.schedule.num_stages:
            if is_first_whole and rows["B"][1:].any():  # its I shows nothing, so it is as that of the others
                rows["I"][0] = rows["B"][0] * rows["I"][1:].sum() / rows["B"][1:].sum()
            rows = {kind: cut_anew(rows[kind], layers, cut, schedule.num_stages) for kind in "FBI"}
            rows["W"] = np.maximum(rows["B"] - rows["I"], 0.0)
        if is_first_whole:
            rows["I"][0], rows["W"][0] = 0.0, rows["B"][0]
        added = {kind: self.between.get(kind, self.usual_between) if with_between else 0.0 for kind in KINDS}
        share_of_rank = self.schedule.num_stages / schedule.num_stages
        return _costs({kind: each * after + added[kind] for kind, each in rows.items()}, share_of_rank, message_bytes)


def fitted(run: ReplayedRun, effects: Effects) -> FittedPipelines:
    """The pipelines of a run.

    Raises:
        TraceError: replicas or steps differ in their orders, stages run on several ranks, or there are ops of kinds
            that no other schedule would have; the message says which.
    """
    table, compute = run.table, run.table.compute
    letters = table.letters
    if other := ", ".join(sorted(set(effects.letters) - set(KINDS))):
        raise _unfit(table, f"it has ops of kind {other}, and only orders of F, B, I and W can be compared")
    hosts = _hosts(table)
    numbers = [_as_they_came(table, replica) for replica in range(table.trace.num_replicas)]
    num_microbatches = len(numbers[0])
    if any(len(each) != num_microbatches for each in numbers):
        raise _unfit(table, "replicas ran different numbers of microbatches")
    place = np.zeros((len(numbers), int(table.microbatch[compute].max()) + 1), int)
    for replica, microbatches in enumerate(numbers):
        place[replica, microbatches] = range(num_microbatches)
    microbatch = place[table.replica, table.microbatch.clip(max=place.shape[1] - 1)]
    orders = set()
    for net in run.networks:
        for replica in range(len(numbers)):
            rows: list[list[Op]] = [[] for _ in range(table.trace.num_ranks)]
            for op in compute[np.argsort(table.start[net.steps[0]][compute], kind="stable")].tolist():
                if table.replica[op] == replica:
                    rows[table.rank[op]].append(Op(str(letters[op]), int(table.stage[op]), int(microbatch[op])))
            orders.add(tuple(map(tuple, rows)))
    if len(orders) > 1:
        raise _unfit(table, "orders differ between steps or replicas (--only-steps chooses steps of one order)")
    try:
        schedule = _schedule(hosts, orders.pop(), num_microbatches)
    except ScheduleError as error:
        raise _unfit(table, f"the order that ran is no valid schedule ({str(error).splitlines()[0]})") from None
    times = {}
    for letter in effects.letters:
        ops = compute[letters[compute] == letter]
        slowest = np.zeros((len(table.steps), len(numbers), table.trace.num_stages, num_microbatches))
        for in_step, taken in zip(slowest, run.own[:, ops]):
            # Of ranks that share an op the slowest says how long it takes.
            np.maximum.at(in_step, (table.replica[ops], table.stage[ops], microbatch[ops]), taken)
        times[letter] = slowest
    factors = np.stack([effects.by_microbatch[:, d, each] for d, each in enumerate(numbers)], axis=1)
    free = free_at(table)
    between = _between(run, free)
    held, (links, guessed) = most_held(schedule), _links(run, free)
    return FittedPipelines(schedule, links, guessed, held, times, factors, effects.by_worker, between)


def _unfit(table: StepTable, why: str) -> TraceError:
    return TraceError(f"{table.trace.name}: {why}, so no other schedule can be predicted")


def _as_they_came(table: StepTable, replica: int) -> list[int]:
    """The microbatches of a replica, in the order in which its first stage began them."""
    ops = table.compute
    first = ops[(table.letters[ops] == "F") & (table.stage[ops] == 0) & (table.replica[ops] == replica)]
    began = table.microbatch[first[np.argsort(table.start[0, first], kind="stable")]].tolist()
    return list(dict.fromkeys(began))  # once, however many ranks share the stage


def _schedule(hosts: list[tuple[int, ...]], order: tuple[tuple[Op, ...], ...], num: int) -> Schedule:
    """The order that ran as a schedule."""
    shared = tuple((stage, ranks) for stage, ranks in enumerate(hosts) if len(ranks) > 1)
    schedule = Schedule.of("recorded", Placement((tuple(ranks[0] for ranks in hosts),), shared), order, num)
    ops = (op for row in schedule.order for op in row)
    backwards = [op.microbatch for op in ops if op.stage == len(hosts) - 1 and op.kind in BACKWARDS]
    if backwards != sorted(backwards):  # torch's looped BFS runs the last microbatch's first
        schedule = declare_order(schedule, backward=list(dict.fromkeys(backwards)))
    check(schedule)
    return replace(schedule, name=_name(schedule))


def _hosts(table: StepTable) -> list[tuple[int, ...]]:
    """The ranks of each stage, each of which runs all its microbatches, alike in every replica."""
    found = []
    for stage in range(table.trace.num_stages):
        ops = table.compute[table.stage[table.compute] == stage]
        each = [
            np.unique(table.rank[ops[table.replica[ops] == d]], return_counts=True)
            for d in range(table.trace.num_replicas)
        ]
        ranks = each[0][0]
        together = len(ranks) == 1 or (table.groups[ops] != NONE).all()
        if not together or any(not np.array_equal(own, ranks) or len(set(counts)) > 1 for own, counts in each):
            several = f"ranks {', '.join(map(str, ranks))}, with some of its microbatches on each"
            where = several if len(ranks) > 1 else "other ranks in another replica"
            raise _unfit(table, f"stage {stage} runs on {where}")
        found.append(tuple(ranks.tolist()))
    return found


def _costs(rows: dict[str, Array], activation: float = 1.0, message_bytes: float = 0.0) -> Costs:
    """Costs by microbatch from ms by stage and microbatch of each kind, (S, N)."""
    given = {kind.lower(): each.tolist() for kind, each in _all_kinds(rows, 0.5).items()}
    num_stages = len(given["f"])
    sizes = {"activation": [activation] * num_stages, "message_bytes": [message_bytes] * num_stages}
    return Costs.by_microbatch(**given, **sizes)


def _all_kinds(rows: dict[str, Array], input_share: float) -> dict[str, Array]:
    """The rows of F, B, I and W, where only some were recorded; of a whole backward I takes the share."""
    none = np.zeros_like(rows["F"])
    whole, first, second = (rows.get(kind, none) for kind in "BIW")
    halves = first + second
    return {
        "F": rows["F"],
        "B": np.where(whole > 0, whole, halves),
        "I": np.where(halves > 0, first, input_share * whole),
        "W": np.where(halves > 0, second, (1 - input_share) * whole),
    }


def cut_anew(rows: Array, layers: Sequence[int], cut: Sequence[int], num_stages: int) -> Array:
    """Ms by stage and microbatch in another cut, (S', N), from those in the recorded one, (S, N)."""
    work, each, beyond = rows.mean(axis=1), np.zeros(len(rows)), np.zeros(len(rows))
    if layers:
        each[:], beyond = layer_times(work, layers)
        counts = np.array(layers)
    else:
        counts = np.full(len(rows), math.lcm(len(rows), num_stages) // len(rows))
        each = work / counts
    new = np.array(cut) if cut else np.full(num_stages, counts.sum() // num_stages)
    before, after = (np.repeat(np.arange(len(given)), given) for given in (counts, new))
    parts = np.zeros((len(new), len(rows)))
    np.add.at(parts, (after, before), 1.0)
    relative = rows / np.maximum(work, 1e-9)[:, None]
    found: Array = parts @ (relative * each[:, None])
    # What stages take besides layers stays. In other stages it is with their first layer, and a loss with the last.
    home = after[np.minimum(np.cumsum(counts) - counts, counts.sum() - 1)]
    home[-1] = len(new) - 1
    np.add.at(found, np.arange(len(new)) if len(new) == len(rows) else home, relative * beyond[:, None])
    return found


def layer_times(work: Array, layers: Sequence[int]) -> tuple[float, Array]:
    """Ms of one layer, and what each stage takes besides.

    A layer takes what it takes where stages have nothing besides layers; what stages take beyond that is an embedding
    or the loss.

    Args:
        work: ms of a microbatch by stage. layers: of each stage.
    """
    counts = np.array(layers)
    each = float((work[counts > 0] / counts[counts > 0]).min())
    return each, work - each * counts


def _between(run: ReplayedRun, free: Array) -> dict[str, float]:
    """Ms from the end of a rank's op to the start of its next that needs no message, by the next one's kind.

    Args:
        free: when each op's rank had ended the op before, (K, M).
    """
    table, found = run.table, {}
    alone = table.is_scope(Scope.COMPUTE)
    alone[run.messages.consumer] = False
    for letter in np.unique(table.letters[table.compute]).tolist():
        alike = alone & (table.letters == letter) & (free > 0)
        gaps = np.maximum(table.start - free, 0.0)[alike]
        found[letter] = float(np.median(gaps)) if gaps.size else 0.0  # as few may wait for what no trace shows
    return found


def _links(run: ReplayedRun, free: Array) -> tuple[Links, tuple[tuple[int, int], ...]]:
    """Each link's median, of messages that their receiver had waited for; and the links that are guessed.

    On gloo a message leaves only when its sender knows that the receive was posted, which takes the way back. So
    messages count whose receiver had waited that long. If there are none, the trace shows between what the link's
    time is, and it is as near as that to the time of the other direction. A rank's first message counts if nothing
    else shows the time, since ranks may begin a step late. A message that nobody waited for says only what its link
    takes at most: such a link is taken to be like its other direction, or else like the middle one of the others, and
    no faster than its receivers were idle.

    Args:
        free: when each op's rank had ended the op before, (K, M).
    """
    table, sent = run.table, run.messages
    ends = np.stack([table.rank[sent.producer], table.rank[sent.consumer]], axis=1)
    waited = table.end[:, sent.producer] - free[:, sent.consumer]
    gap = table.start[:, sent.consumer] - table.end[:, sent.producer]
    on = {link: (ends == np.array(link)).all(axis=1) for link in sorted(set(map(tuple, ends.tolist())))}
    least = {link: gap[:, of][waited[:, of] >= 0].min(initial=np.inf) for link, of in on.items()}
    found: dict[tuple[int, int], float] = {}
    guessed: list[tuple[int, int]] = []
    for link, of in sorted(on.items(), key=lambda each: least[each[0]]):  # those that nobody waited for come last
        own, had, other = run.messages.own[:, of], waited[:, of], least.get(link[::-1], np.inf)
        rest, later = np.maximum(min(least[link], other) - had, 0.0), free[:, sent.consumer[of]] > 0
        if (rest[later] == 0).any() or (np.isfinite(other) and not (had[later] >= 0).any()):
            rest, had = np.where(later, rest, np.inf), np.where(later, had, -np.inf)
        if (rest == 0).any():
            found[link] = float(np.median(own[rest == 0]))
        elif (had >= 0).any():
            other = other if np.isfinite(other) else np.median((own + had)[had >= 0]) / 2
            found[link] = float(np.clip(other, *(np.median(ms[had >= 0]) for ms in (own - rest, own))))
        else:
            usual = np.inf
            if not np.isfinite(least[link]):  # its receivers ran other ops, and were idle only after those
                idle = float(np.median(np.where(later, gap[:, of] + had, 0.0)))
                shown = [ms for each, ms in found.items() if np.isfinite(least[each])] or [np.inf]
                usual = max(idle, float(np.median(shown)))
                guessed += [link] * (2 * idle < usual)
            found[link] = min(found.get(link[::-1], usual), float(gap[:, of].min()))
    return Links({link: max(0.0, ms) for link, ms in found.items()}), tuple(guessed)


def most_held(schedule: Schedule) -> float:
    """The most that any rank holds, in its share of the model's activations."""
    return max(peak_in_flight(schedule)) * schedule.num_ranks / schedule.num_stages


def _name(schedule: Schedule) -> str:
    for name, known in buildable(NAMED, schedule.num_ranks, schedule.num_microbatches):
        if known.order == schedule.order and known.placement == schedule.placement:
            return name
    return "recorded"
