"""The story of a run, told from its logs: which link was slow when, what was decided, and what it saved.

    control.jsonl      the controller's log: every message's time, every decision       needed
    iterations.jsonl   one line an iteration, from the first one on                     if there
    timelines.jsonl    when the ops of some iterations ran                              if there

"Saved" is measured: iterations with a change are held against the median of those before it under the same links.
Where links are not late any more nothing is gained, and what an iteration takes longer than undisturbed ones counts
as lost by the change. Beside that each iteration is simulated under links and op times as they were measured in it,
once with what ran and once with the first configuration; both are called simulated.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from penstock.control.candidate import Action
from penstock.control.configuration import Configuration, Job, peaks
from penstock.control.errors import ControlError
from penstock.control.events import undirected
from penstock.control.robust_statistics import AS_DEVIATION
from penstock.control.trial import LATER
from penstock.report.log_reader import LogContents, LoggedDecision, add_record, json_lines, read_log
from penstock.report.run_story import (
    AlarmCounts,
    DecisionOutcome,
    Fault,
    Iteration,
    RanConfiguration,
    RunMemory,
    RunStory,
    TimeShares,
    TitledTimeline,
    spells_of,
)
from penstock.report.what_if import ObservedIteration, WhatIfSimulator, picked
from penstock.schedule import Op
from penstock.simulation import TimedOp, Timeline

MOST = 300
"""Iterations that are simulated with what ran, and with the first configuration: all, or so many, evenly picked."""
AROUND = 8
"""Iterations before a switch that it is held against, where no link had changed."""
COUNTED = {
    "failovers": "connections that went on over another interface",
    "failbacks": "connections that went back to a better interface",
    "reconnects": "connections made again over the same interface",
    "resent": "messages sent again",
    "doubled": "messages that came twice, and were dropped",
    "starved": "messages that waited for room in host memory",
}
"""What delegates count, in words; where none of it happened nothing is said."""
_STANDS_OUT = 3.0
"""Times what a quarter of the messages take at most: a delay above that is the link's own."""
_WILD = 5.0
"""Deviations above the median from which on a delay is no noise."""
BYTES = 1e4
"""Activations above this are bytes, not units."""


def read_story(
    log: Iterable[str],
    *,
    name: str,
    iterations: Iterable[str] = (),
    timelines: Iterable[str] = (),
    facts: Sequence[tuple[str, str]] = (),
    most: int = MOST,
) -> RunStory:
    """Makes a run's story of the lines of its files.

    Args:
        log: of control.jsonl; one that was cut off is read as far as it goes.
        name: of the run; facts: what else there is to say of it, as names and values.
        iterations, timelines: of the files of these names.
        most: see `MOST`.

    Raises:
        ControlError: no log, one of another version, or a run without an iteration.
    """
    contents = read_log(log)
    records = list(json_lines(iterations, "iterations.jsonl"))
    for record in records:
        add_record(contents, record)
    recorded = list(json_lines(timelines, "timelines.jsonl"))
    if not contents.seen:
        raise ControlError("the log has no iteration that ended: there is nothing to report yet")
    simulator = WhatIfSimulator(contents.job)
    rows = [contents.seen[number] for number in sorted(contents.seen)]
    links = tuple(sorted({link for row in rows for link in row.times}, key=lambda link: (undirected(link), link)))
    ran = _simulated(contents, simulator, rows, most)
    kept = _kept(contents, simulator, rows, most)
    found = tuple(
        Iteration(
            row.number,
            row.ms,
            row.decision,
            ran[row.number].makespan if row.number in ran else None,
            row.ms if row.decision == 0 else kept.get(row.number),
            tuple(row.delay(link) for link in links),
        )
        for row in rows
    )
    least = _least(contents.job, rows)
    undisturbed, source = _undisturbed(contents, simulator, found, least)
    found = with_baselines(contents, found, undisturbed, least)
    late = _late(found, least)
    decided = tuple(_decided(contents, contents.chosen[number], found, late) for number in sorted(contents.chosen))
    return RunStory(
        name=name,
        facts=(*_facts(contents.job), *facts),
        links=links,
        iterations=found,
        decisions=decided,
        spells=spells_of(found, links, least),
        ran=_configurations(contents, found, ran, least),
        memory=_memory(contents, ran.values(), records, recorded),
        alarms=AlarmCounts(
            sum(watch.num_suspected for watch in contents.monitor.watches),
            sum(watch.num_verified for watch in contents.monitor.watches),
            sum(watch.num_false for watch in contents.monitor.watches),
        ),
        smallest_delay=least,
        undisturbed=undisturbed,
        undisturbed_from=source,
        unanswered=tuple(f"After iteration {each.iteration}: {each}" for each in contents.unanswered),
        faults=tuple(sorted((*contents.faults, *_counted(records)), key=lambda fault: fault.iteration or 0)),
        counters=_counters(records),
        shown=_shown(contents, decided, ran, recorded),
    )


def _least(job: Job, rows: Sequence[ObservedIteration]) -> float:
    """From which delay on (ms) a link counts as late: well above what every message takes on its way, and above what
    messages vary by on a busy machine, as far as that is small against a microbatch's part of an iteration."""
    delays = sorted(delay for row in rows for link in row.times if (delay := row.delay(link)) is not None)
    if not delays:
        return job.smallest_delay
    usual = min(delays[len(delays) // 4], job.mean_op / 4)
    wild = median(delays) + _WILD * AS_DEVIATION * median(abs(delay - median(delays)) for delay in delays)
    short = sorted(row.ms for row in rows)[len(rows) // 4] / (2 * job.start.schedule.num_microbatches)
    return max(job.smallest_delay, _STANDS_OUT * usual, min(wild, short))


def _simulated(
    contents: LogContents, simulator: WhatIfSimulator, rows: Sequence[ObservedIteration], most: int
) -> dict[int, Timeline]:
    """What ran, simulated, by iteration: picked evenly, and every iteration around a switch."""
    measured = [row for row in rows if row.times]
    wanted = {measured[place].number for place in picked(len(measured), most)}
    firsts = [chosen.first for chosen in contents.chosen.values() if chosen.first is not None]
    wanted |= {first + step for first in firsts for step in (-1, 0, 1)}
    found = {}
    for row in measured:
        if row.number in wanted:
            configuration = contents.configuration(row.decision)
            timeline = simulator.run(configuration, row, configuration)
            if timeline is not None:
                found[row.number] = timeline
    return found


def _kept(
    contents: LogContents, simulator: WhatIfSimulator, rows: Sequence[ObservedIteration], most: int
) -> dict[int, float]:
    """The first configuration, simulated, by iteration that ran another."""
    other = [row for row in rows if row.decision and row.times]
    found = {}
    for row in (other[place] for place in picked(len(other), most)):
        timeline = simulator.run(contents.job.start, row, contents.configuration(row.decision))
        if timeline is not None:
            found[row.number] = timeline.makespan
    return found


def _undisturbed(
    contents: LogContents, simulator: WhatIfSimulator, iterations: Sequence[Iteration], least: float
) -> tuple[float, str]:
    """How long an iteration of the first configuration takes with no link late, and how that is known."""
    calm = [
        each.ms for each in iterations if each.decision == 0 and all(d is not None and d < least for d in each.delays)
    ]
    if len(calm) >= 3:
        return median(calm), f"median of the {len(calm)} iterations of the first configuration with no link late"
    return simulator.healthy(contents.job.start).makespan, "simulated with no link late"


def with_baselines(
    contents: LogContents, iterations: Sequence[Iteration], undisturbed: float, least: float
) -> tuple[Iteration, ...]:
    """The iterations with what the steps took before the changes that run in them, under the same links."""
    start = contents.job.start.digest
    late = _late(iterations, least)
    known: dict[str, tuple[float, bool] | None] = {start: None}
    now: tuple[float, bool] | None = None
    before, found = 0, []
    for each in iterations:
        if each.decision != before:
            chosen = contents.chosen[each.decision]
            digest = chosen.configuration.digest
            if chosen.value["action"] == Action.TAKE_BACK.value or digest == start:
                now = known.get(digest)
            elif now is None or chosen.began is not None:
                reference = _before(chosen, iterations, late)
                if reference:
                    among_late = sum(one.number in late for one in reference) > len(reference) / 2
                    verdict = _verdict(contents, chosen, iterations, late)
                    level = median(one.ms for one in reference) if verdict is None else float(verdict["before"])
                    now = level, among_late
            known[digest] = now
            before = each.decision
        baseline = None
        if now is not None:
            level, was_late = now
            if (each.number in late) == was_late:
                baseline = level
            elif each.number not in late:
                baseline = min(undisturbed, each.ms)  # the fault is over: nothing is gained, something may be lost
        found.append(replace(each, baseline=baseline))
    return tuple(found)


def _late(iterations: Sequence[Iteration], least: float) -> Container[int]:
    """Numbers of the iterations in which a link was late."""
    return {each.number for each in iterations if any(delay is not None and delay >= least for delay in each.delays)}


def _before(chosen: LoggedDecision, iterations: Sequence[Iteration], late: Container[int]) -> list[Iteration]:
    """The iterations that a decision is held against: those before it since what it answers began, without the first,
    which was slow in part; the last ones where nothing had begun."""
    rows, began = _ran_before(chosen, iterations), _began(chosen, iterations, late)
    if began is None:
        return rows[-AROUND:]
    since = [each for each in rows if each.number >= began]
    # Of three, the median leaves out the first anyway, and the last, in which ranks may also agree on the change.
    return since if len(since) == 3 else (since[1:] or since)[-LATER:]


def _ran_before(chosen: LoggedDecision, iterations: Sequence[Iteration]) -> list[Iteration]:
    """The iterations that ran what a decision replaced; none where it never ran."""
    first = chosen.first
    if first is None:
        return []
    ran = next((each.decision for each in reversed(iterations) if each.number < first), 0)
    return [each for each in iterations if each.number < first and each.decision == ran]


def _began(chosen: LoggedDecision, iterations: Sequence[Iteration], late: Container[int]) -> int | None:
    """The iteration in which what a decision answers began.

    The controller also looks at links now and then, and may see a late one before it is verified. Then it began where
    the last iterations before the switch turned from healthy to late, or back, if they did so once.
    """
    if chosen.began is not None:
        return chosen.began
    rows = _ran_before(chosen, iterations)[-AROUND:]
    turns = [b.number for a, b in pairwise(rows) if (a.number in late) != (b.number in late)]
    return turns[0] if len(turns) == 1 else None


def _verdict(
    contents: LogContents, chosen: LoggedDecision, iterations: Sequence[Iteration], late: Container[int]
) -> Mapping[str, Any] | None:
    """The last verdict on a decision. None also where its steps before ran under other links than those since,
    because nothing had been verified: their median says nothing about the change."""
    return contents.verdict(chosen.number) if _began(chosen, iterations, late) == chosen.began else None


def _decided(
    contents: LogContents, chosen: LoggedDecision, iterations: Sequence[Iteration], late: Container[int]
) -> DecisionOutcome:
    value, first, start = chosen.value, chosen.first, contents.job.start
    mine = [each for each in iterations if each.decision == chosen.number]
    before, after = _before(chosen, iterations, late), [each.ms for each in mine[1:] or mine][:LATER]
    known = [each.saved for each in mine if each.baseline is not None]
    measured = (median(each.ms for each in before) if before else None, median(after) if after else None)
    if (held := _verdict(contents, chosen, iterations, late)) is not None:
        measured = float(held["before"]), float(held["after"])
    verdict = contents.verdict(chosen.number)
    return DecisionOutcome(
        number=chosen.number,
        action=str(value["action"]),
        reason=str(value["reason"]),
        what=in_words(chosen.configuration, start),
        began=_began(chosen, iterations, late),
        made=int(value["iteration"]),
        first=first,
        outcome="ran" if mine else chosen.outcome if chosen.outcome == "given up" else "open",
        ms_now=value["ms_now"],
        ms_then=float(value["ms_then"]),
        price=float(value["price"]),
        measured_before=measured[0],
        measured_after=measured[1],
        saved=sum(known) if known else None,
        verdict="" if verdict is None else str(verdict["why"]),
        taken_back=verdict is not None and not verdict["kept"],
    )


def in_words(configuration: Configuration, start: Configuration) -> str:
    """A configuration in a few words."""
    links = ", ".join(f"{a}–{b}" for a, b in configuration.delegated)
    name = configuration.schedule.name
    if configuration.schedule != start.schedule:
        name = f"{name} re-planned" if name == start.schedule.name else f"re-planned ({name})"
    return f"{name}, {configuration.dispatch.value}, " + (f"delegated {links}" if links else "all links direct")


def _configurations(
    contents: LogContents, iterations: Sequence[Iteration], ran: Mapping[int, Timeline], least: float
) -> tuple[RanConfiguration, ...]:
    late = _late(iterations, least)
    found = []
    for number in sorted({each.decision for each in iterations}):
        mine = [each for each in iterations if each.decision == number]
        both = [(each.number, each.ms, each.simulated) for each in mine if each.simulated is not None and each.ms > 0]
        at = _middle(both, late) if both else None
        found.append(
            RanConfiguration(
                decision=number,
                what=in_words(contents.configuration(number), contents.job.start),
                num_iterations=len(mine),
                measured=median(ms for _, ms, _ in both) if both else None,
                simulated=median(simulated for _, _, simulated in both) if both else None,
                error=median(abs(simulated / ms - 1) for _, ms, simulated in both) if both else None,
                shares=TimeShares.of(ran[at]) if at is not None else None,
                at=at,
            )
        )
    return tuple(found)


def _middle(both: Sequence[tuple[int, float, float]], late: Container[int]) -> int:
    """The iteration of middling time among those with a late link; among all where no link was late."""
    rows = [each for each in both if each[0] in late] or list(both)
    return sorted(rows, key=lambda each: each[1])[len(rows) // 2][0]


def _memory(
    contents: LogContents,
    ran: Iterable[Timeline],
    records: Iterable[Mapping[str, Any]],
    recorded: Iterable[Mapping[str, Any]],
) -> RunMemory | None:
    """The most each rank held: measured where the records say it, else simulated, and as recorded iterations ran."""
    rows = [tuple(map(float, record["peaks"])) for record in records if record.get("peaks")]
    source = "measured"
    if not rows:
        rows = [timeline.peak_activations for timeline in ran]
        source = "simulated"
        measured = [_measured(contents, record) for record in recorded]
        whole = [timeline for timeline in measured if len(timeline.ops) == timeline.schedule.num_ops]
        if whole:
            rows += [tuple(peaks(timeline.executed(), contents.job.costs)) for timeline in whole]
            source = f"simulated, and as {len(whole)} recorded iterations ran"
    if not rows:
        return None
    caps = [contents.configuration(number).caps for number in {0, *(row.decision for row in contents.seen.values())}]
    most, allowed = (tuple(map(max, zip(*each, strict=True))) for each in (rows, caps))
    in_bytes = max(allowed) >= BYTES
    scale = 2.0**20 if in_bytes else 1.0
    return RunMemory(
        tuple(each / scale for each in most),
        tuple(each / scale for each in allowed),
        "MiB of activations" if in_bytes else "activations",
        source,
    )


def _counters(records: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, float], ...]:
    """What the delegates of all ranks had counted in the end."""
    last: Mapping[str, Any] = next((record["counters"] for record in reversed(records) if record.get("counters")), {})
    return tuple((words, float(last[name])) for name, words in COUNTED.items() if last.get(name))


def _counted(records: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """Iterations in which a count rose that speaks of a fault."""
    found, before = [], dict.fromkeys(COUNTED, 0)
    for record in records:
        now = record.get("counters") or {}
        rose = {name: now[name] - before[name] for name in COUNTED if now.get(name, 0) > before[name]}
        before |= {name: now[name] for name in rose}
        rose.pop("starved", None)
        if rose:
            said = ", ".join(f"{COUNTED[name]}: {count}" for name, count in rose.items())
            found.append(Fault(int(record["iteration"]), said))
    return found


def _shown(
    contents: LogContents,
    decided: Sequence[DecisionOutcome],
    ran: Mapping[int, Timeline],
    records: Iterable[Mapping[str, Any]],
) -> tuple[TitledTimeline, ...]:
    """An iteration before the switch that gained most and one after it: measured where both were recorded."""
    there = [each for each in decided if each.first is not None and each.outcome == "ran"]
    if not there:
        return ()
    best = max(there, key=lambda each: ((each.ms_now or each.ms_then) - each.ms_then, -each.number))
    recorded = {str(record.get("why")): record for record in records}
    pair = [recorded.get(f"before {best.number}"), recorded.get(f"after {best.number}")]
    if pair[0] is not None and pair[1] is not None:
        rows = [(int(each["iteration"]), _measured(contents, each)) for each in pair if each is not None]
    else:
        first = best.first or 0
        after = first + 1 if first + 1 in ran and contents.seen[first + 1].decision == best.number else first
        rows = [(number, ran[number]) for number in (first - 1, after) if number in ran]
    found = []
    for number, timeline in rows:
        configuration = contents.configuration(contents.seen[number].decision)
        found.append(TitledTimeline(f"iteration {number}: {in_words(configuration, contents.job.start)}", timeline))
    return tuple(found)


def _measured(contents: LogContents, record: Mapping[str, Any]) -> Timeline:
    """A line of timelines.jsonl. Raises ControlError for one that does not fit the log."""
    try:
        configuration = contents.configuration(int(record["number"]))
        ops = [
            TimedOp(int(rank), Op(str(kind), int(stage), int(microbatch)), float(start), float(end))
            for rank, kind, stage, microbatch, start, end in record["ops"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ControlError(
            f"timelines.jsonl: a line that does not fit the log: {error!r} in {str(record)[:200]}"
        ) from None
    ops.sort(key=lambda timed: (timed.rank, timed.start))
    none = (0.0,) * configuration.schedule.num_ranks
    return Timeline(configuration.schedule, tuple(ops), (), none, "measured", configuration.dispatch.value)


def _facts(job: Job) -> tuple[tuple[str, str], ...]:
    schedule = job.start.schedule
    return (
        ("schedule", schedule.name),
        ("ranks", str(schedule.num_ranks)),
        ("microbatches", str(schedule.num_microbatches)),
        ("mean op", f"{job.mean_op:.3g} ms"),
        ("first configuration", in_words(job.start, job.start)),
    )
