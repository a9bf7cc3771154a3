"""The summary of a report, in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.draw.scale import percent, short
from penstock.report.run_record import RunRecord
from penstock.report.run_story import SURE, DecisionOutcome, LatePeriod, RunPlan, RunStory, link_name, main_spells

FEW = 3
"""Links that a sentence names."""
FAR = 1.3
"""How many times its median a link's largest delay is to be told."""
NOTHING = 0.01
"""Share of the run's time below which what was lost is next to nothing."""


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
    """The one sentence that the page begins with: what was late, what was done about it, and what that saved. If
    the run ended slower than it began, it says that first.
    """
    parts = [_slower(story), _broken(story), _late(story), _answer(story), _saved(story)]
    return sentence("; ".join(part for part in parts if part))


def more(story: RunStory) -> list[str]:
    """The sentences below it."""
    found = [f"{times(len(story.iterations), 'iteration')} in {seconds(story.total)}"]
    ran = [each for each in story.decisions if each.outcome == "ran"]
    found[0] += f", {times(len(ran), 'change')} of what runs"
    if (given_up := sum(each.outcome == "given up" for each in story.decisions)) > 0:
        found[0] += f", {given_up} given up because not all ranks could take it"
    tried = sum(each.taken_back for each in ran)
    if tried:
        found[0] += f", {tried} of them taken back because measured iterations were no faster"
    found.append(alarms(story))
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
        found.append(sentence(", ".join([f"The loss is {loss}", *ended["beside"]])))
    return found


def alarms(story: RunStory) -> str:
    """Alarms in a sentence."""
    a = story.alarms
    if not a.suspected:
        return "No change of a link was suspected"
    return (
        f"{times(a.suspected, 'change')} of links suspected: {a.verified} verified, "
        f"{times(a.false, 'false alarm')} that led to nothing"
    )


def _slower(story: RunStory) -> str:
    """That iterations are longer at the end than when the run began, or than before the last change."""
    if story.slower is None:
        return ""
    since, then, now = story.slower
    return f"iterations take {short(now)} ms at the end, {short(then)} {since}"


def _broken(story: RunStory) -> str:
    if not story.faults:
        return ""
    first = story.faults[0]
    where = "" if first.iteration is None else f" in iteration {first.iteration}"
    others = f" ({len(story.faults)} events in all)" if len(story.faults) > 1 else ""
    return f"{first.what}{where}{others}"


def _late(story: RunStory) -> str:
    spells = main_spells(story.spells)
    count = times(len(story.iterations), "iteration")
    if not spells and story.faults:
        return ""
    if not spells:
        return f"no link was late by {short(story.smallest_delay)} ms or more in {count}"
    names = sorted({spell.name for spell in spells})
    if len(names) == 1 and len(spells) == 1:
        return f"link {names[0]} was {_delays(spells)} late for {_for(spells[0], story)}"
    if len(names) == 1:
        total = sum(spell.num_late for spell in spells)
        late = f"{_delays(spells)} late {len(spells)} times, for {times(total, 'iteration')} in all"
        return f"link {names[0]} was {late}"
    named = f"links {listed(names)}" if len(names) <= FEW else f"{len(names)} links"
    together = len(spells) == len(names) and all(spell.num_late == len(story.late) for spell in spells)
    how_long = (
        f"for {_for(spells[0], story)}" if together else f"at one time or another, in {len(story.late)} of {count}"
    )
    return f"{named} were {_delays(spells)} late {how_long}"


def _for(spell: LatePeriod, story: RunStory) -> str:
    if spell.num_late == len(story.iterations):
        return f"all {times(spell.num_late, 'iteration')}"
    return times(spell.num_late, "iteration")


def _delays(spells: Sequence[LatePeriod]) -> str:
    """The delays of spells in the median, and the largest where it is far above."""
    low, high, most = (
        short(float(f"{value:.3g}"))
        for value in (min(s.ms for s in spells), max(s.ms for s in spells), max(s.most for s in spells))
    )
    said = f"{low} ms" if low == high else f"{low} to {high} ms"
    return f"{said} (at most {most})" if float(most) > FAR * float(high) else said


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _answer(story: RunStory) -> str:
    """What was done: every link that moved and by which path, the dispatch, nodes that changed places."""
    ran = [each for each in story.decisions if each.outcome == "ran" and each.first is not None]
    stayed = [each for each in ran if each.stayed]
    if not ran and _is_nothing(story):
        return ""
    if not ran:
        return "what runs was never changed" if story.decisions or story.spells else ""
    if not stayed:
        return f"{times(sum(each.taken_back for each in ran), 'change')} of what runs was tried and taken back"
    done = changes([story.start, *(each.plan for each in stayed)], ran[-1].plan)
    first = next((each for each in stayed if reaction(story, each) is not None), stayed[0])
    after = reaction(story, first)
    return done + (f" after {times(after, 'iteration')}" if after else f" in iteration {first.first}")


def changes(plans: Sequence[RunPlan], last: RunPlan) -> str:
    """What distinguishes plans from the first of them, and what of it the last plan no longer has."""
    start, *others = plans
    links = sorted({link for plan in others for link in plan.delegated} - set(start.delegated))
    back = [link for link in links if link not in last.delegated]
    found = []
    if links:
        found.append(f"{_links(links)} went by delegates")
    if links and back:
        found[-1] += " for a time" if back == links else f" ({_links(back)} for a time)"
    if given_back := sorted(set(start.delegated) - set(last.delegated)):
        found.append(f"{_links(given_back)} went from delegates to {'their' if given_back[1:] else 'its'} own path")
    if any(plan.is_replanned for plan in others):
        found.append("the schedule was re-planned" + " for a time" * (not last.is_replanned))
    if dispatches := [plan.dispatch for plan in others if plan.dispatch != start.dispatch]:
        found.append(f"dispatch became {dispatches[-1]}" + " for a time" * (last.dispatch == start.dispatch))
    moved = sorted({a for plan in others for a, b in zip(start.nodes, plan.nodes, strict=False) if a != b})
    if moved:
        is_back = " for a time" * (last.nodes == start.nodes)
        found.append(f"nodes {listed([str(node) for node in moved])} changed places" + is_back)
    return listed(found) if found else "what ranks may hold was changed"


def _links(links: Sequence[tuple[int, int]]) -> str:
    return f"link{'s' * (len(links) > 1)} {listed([link_name(link) for link in links])}"


def reaction(story: RunStory, decided: DecisionOutcome) -> int | None:
    """Late iterations that still ran what ran before, from the first that was late until the switch."""
    if decided.first is None:
        return None
    began = [spell.first for spell in story.spells if spell.first <= decided.made and spell.last >= decided.made]
    start = decided.began if decided.began is not None else max(began, default=None)
    return None if start is None else decided.first - start


def _saved(story: RunStory) -> str:
    """What was saved, as measured, or that it cannot be told."""
    lost, saved = story.lost, story.saved
    ran = [each for each in story.decisions if each.outcome == "ran"]
    if ran and saved is None and story.saved_about is not None:
        low, high = (story.saved_about[0] + sign * SURE * story.saved_about[1] for sign in (-1, 1))
        if low > 0 or high < 0:
            done, ends = ("saved", (low, high)) if low > 0 else ("cost", (-high, -low))
            return f"the changes {done} {seconds(ends[0])} to {seconds(ends[1])}, as far as iterations that vary tell"
        return f"what the changes saved is within noise: {seconds(-low)} lost to {seconds(high)} saved"
    if ran and saved is None:
        return "too few iterations ran under the same links before the change to measure what it saved"
    if ran and saved is not None and saved < 0:
        return f"the changes cost {seconds(-saved)}, by measured iterations"
    if not story.spells:
        return ""
    if _is_nothing(story):
        return f"that cost next to nothing ({seconds(max(0.0, lost))})" + ("" if ran else ", and nothing was changed")
    if not saved:
        return f"{seconds(lost)} were lost, none of it saved"
    return f"{seconds(saved)} of {seconds(lost)} lost time was saved, by measured iterations"


def _is_nothing(story: RunStory) -> bool:
    """Whether late links would have cost next to nothing."""
    return story.lost < NOTHING * story.total


def sentence(text: str) -> str:
    """A text with a capital and a full stop."""
    return text[:1].upper() + text[1:] + "."
