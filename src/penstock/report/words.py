"""The summary of a report, in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.draw.style import percent, short
from penstock.report.run_story import SURE, RunPlan, RunRecord, RunStory, link_name, main_spells

FEW = 3
"""Links that a sentence names."""
FAR = 1.3
"""How many times its median a link's largest delay is to be told."""


def way_name(link: tuple[int, int]) -> str:
    """One direction of a link."""
    return f"{link[0]} → {link[1]}"


def seconds(ms: float) -> str:
    """A long time: 840 ms, 28.3 s, 12.5 min."""
    size = abs(ms)
    if size < 1e3:
        return f"{ms:.0f} ms"
    if size < 100e3:
        return f"{ms / 1e3:.1f} s"
    return f"{ms / 1e3:.0f} s" if size < 600e3 else f"{ms / 60e3:.1f} min"


def times(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def sentences(story: RunStory | None, record: RunRecord | None = None) -> list[str]:
    """The headline of a run, and the sentences below it."""
    of_steps = [] if record is None else words_of(record)
    if story is None:
        return of_steps
    learned = record is not None and record.noun == "step"  # the story counts iterations itself
    return [headline(story), *(of_steps if learned else ()), *more(story)]


def headline(story: RunStory) -> str:
    """The one sentence that the page begins with: which link was late, how much and when, what was done about it, and
    what that saved. If the run ended slower than it began, it says that first.
    """
    parts = [_slower(story), _broken(story), _late(story), _answer(story), _saved(story)]
    return sentence("; ".join(part for part in parts if part))


def more(story: RunStory) -> list[str]:
    """The sentences below it."""
    found = [f"{times(len(story.iterations), 'iteration')} in {seconds(story.total)}"]
    ran = [each for each in story.decisions if each.outcome == "ran"]
    found[0] += f", {times(len(ran), 'change')} of the plan"
    if (given_up := sum(each.outcome == "given up" for each in story.decisions)) > 0:
        found[0] += f", {given_up} given up because not all ranks could take it"
    if tried := sum(each.taken_back for each in ran):
        found[0] += f", {tried} of them taken back because measured iterations were no faster"
    if story.error is not None:
        found.append(f"Simulated and measured iteration time differ by {percent(story.error)} in the median")
    return [*(sentence(each) for each in found), *(sentence(each) for each in story.unanswered)]


def words_of(record: RunRecord) -> list[str]:
    """The sentences on the steps of a run that learns; the first says what became of its loss."""
    ended, known = record.ended, [loss for _, loss in record.known("loss")]
    ran = times(record.steps[-1], "step") + (f" of {ended['schedule']}" if "schedule" in ended else "")
    if record.asked is not None and record.steps[-1] < record.asked:
        ran += f", {record.asked:,} were asked for"
    became = "no loss was finite"
    if known:
        last = "nan" if record.columns["loss"][-1] is None else f"{known[-1]:.3f}"
        became = f"training loss went from {known[0]:.3f} to {last}"
    wrong = f"; {record.not_finite}" if known and record.not_finite else ""
    found = [sentence(f"{became} in {ran}{wrong}")]
    if not ended:
        found.append("The run has not ended, or was killed: memory, a timeline and notices come with its end.")
    elif ended.get("interrupted"):
        found.append("It was interrupted.")
    if "unit" in ended:
        loss = "not finite" if ended["loss"] is None else f"{ended['loss']:.3f} {ended['unit']}"
        found.append(sentence(f"The loss is {loss}"))
    return found


def _slower(story: RunStory) -> str:
    """That iterations are longer at the end than when the run began, or than before the last change."""
    if story.slower is None:
        return ""
    since, then, now = story.slower
    return f"iterations take {short(now)} ms at the end, {short(then)} {since}"


def _broken(story: RunStory) -> str:
    if not story.faults:
        return ""
    fault = story.faults[0]
    where = "" if fault.iteration is None else f" in iteration {fault.iteration}"
    others = f" ({len(story.faults)} events in all)" if len(story.faults) > 1 else ""
    return f"{fault.what}{where}{others}"


def _late(story: RunStory) -> str:
    """Which links were late, by how much in the median (and at most, where that is far above), and when."""
    spells = main_spells(story.spells)
    count = times(len(story.iterations), "iteration")
    if not spells:
        return "" if story.faults else f"no link was late by {short(story.smallest_delay)} ms or more in {count}"
    names = sorted({spell.name for spell in spells})
    named = f"{len(names)} links" if len(names) > FEW else f"link{'s' * (len(names) > 1)} {listed(names)}"
    low, high = (short(float(f"{of(spell.ms for spell in spells):.3g}")) for of in (min, max))
    by = f"{low} ms" if low == high else f"{low} to {high} ms"
    most = max(spell.most for spell in spells)
    if most > FAR * float(high):
        by += f" (at most {short(float(f'{most:.3g}'))})"
    numbers = {number for spell in spells for number in spell.numbers}
    began, ended, end = min(numbers), max(numbers), max(each.number for each in story.iterations)
    when = f"from iteration {began} " + ("on" if ended >= end else f"to {ended}")
    often = "" if len(numbers) == ended - began + 1 else f", in {len(numbers)} of {count}"
    return f"{named} {'were' if len(names) > 1 else 'was'} {by} late {when}{often}"


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _answer(story: RunStory) -> str:
    """What was done: every link that moved and by which path, the dispatch, nodes that changed places."""
    ran = [each for each in story.decisions if each.outcome == "ran"]
    stayed = [each for each in ran if each.stayed]
    if stayed:
        done = changes([story.start, *(each.plan for each in stayed)], ran[-1].plan)
        ran_first = min(each.first for each in stayed if each.first is not None)
        return f"from iteration {ran_first} on {done}"
    if ran:
        tried = sum(each.taken_back for each in ran)
        return f"{times(tried, 'change')} of the plan {'was' if tried == 1 else 'were'} tried and taken back"
    return "the plan was never changed" if story.decisions or story.spells else ""


def changes(plans: Sequence[RunPlan], last: RunPlan) -> str:
    """What distinguishes plans from the first of them. What the last plan no longer has was for a time."""
    start, *others = plans
    went = {link for plan in others for link in plan.delegated} - set(start.delegated)
    moved = {
        str(node) for plan in others for node, then in zip(start.nodes, plan.nodes, strict=False) if node != then
    }
    dispatches = [plan.dispatch for plan in others if plan.dispatch != start.dispatch]
    found = [
        (f"{_links(links)} went by delegates", is_over)
        for links, is_over in ((went & set(last.delegated), False), (went - set(last.delegated), True))
        if links
    ]
    if given_back := set(start.delegated) - set(last.delegated):
        found.append((f"{_links(given_back)} went from delegates to the own path", False))
    if any(plan.is_replanned for plan in others):
        found.append(("the schedule was re-planned", not last.is_replanned))
    if dispatches:
        found.append((f"dispatch became {dispatches[-1]}", last.dispatch == start.dispatch))
    if moved:
        found.append((f"nodes {listed(sorted(moved))} changed places", last.nodes == start.nodes))
    said = [what + " for a time" * is_over for what, is_over in found]
    return listed(said) if said else "what ranks may hold was changed"


def _links(links: Iterable[tuple[int, int]]) -> str:
    names = [link_name(link) for link in sorted(links)]
    return f"link{'s' * (len(names) > 1)} {listed(names)}"


def _saved(story: RunStory) -> str:
    """What was saved, as measured, or that it cannot be told."""
    if not any(each.outcome == "ran" for each in story.decisions):
        return f"late links cost {seconds(story.lost)}, and none of it was saved" if story.spells else ""
    if story.saved_about is None:
        return "too few iterations ran under the same links before the change to measure what it saved"
    if story.saved is None:
        done = "cost" if story.saved_about[0] < 0 else "saved"
        return f"the changes {done} {range_of(*story.saved_about)}: iterations vary too much to say it more exactly"
    if story.saved < 0:
        return f"the changes cost {seconds(-story.saved)}, by measured iterations"
    if not story.saved and not story.spells:
        return ""
    lost = f"of {seconds(story.lost)} that late links would have cost"
    return f"{lost}, {seconds(story.saved)} were saved, by measured iterations"


def range_of(ms: float, error: float) -> str:
    """The likely range of a time (ms), from the time and its standard error. The sign of the time is left out."""
    low, high = (seconds(abs(ms) + sign * SURE * error) for sign in (-1, 1))
    return f"{low} to {high}"


def sentence(text: str) -> str:
    """A text with a capital and a full stop."""
    return text[:1].upper() + text[1:] + "."
