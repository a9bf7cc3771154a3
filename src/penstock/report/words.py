"""The summary of a report, in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dispatch import Dispatch
from penstock.draw.scale import percent, short
from penstock.report.run_record import RunRecord
from penstock.report.run_story import DecisionOutcome, LatePeriod, RunStory

DONE = {
    "delegate": "{it} delegated",
    "re-plan": "the schedule was re-planned",
    "re-plan and delegate": "{it} delegated and the schedule re-planned",
    "change dispatch": "the ranks changed to {dispatch} dispatch",
    "stop delegating": "{it} taken back from the delegates",
}
FEW = 3
"""Links that a sentence names."""
FAR = 1.3
"""How many times its median a link's largest delay is to be told."""
SMALL = 0.1
"""Share of the costliest spell below which another is not spoken of."""
NOTHING = 0.01
"""Share of the run's time below which what was lost is next to nothing."""


def link_name(link: tuple[int, int]) -> str:
    """A link, both directions."""
    return f"{link[0]}–{link[1]}"


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


def headline(story: RunStory) -> str:
    """The one sentence that the page begins with."""
    parts = [_broken(story), _late(story), _answer(story), _saved(story)]
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


def _broken(story: RunStory) -> str:
    if not story.faults:
        return ""
    first = story.faults[0]
    where = "" if first.iteration is None else f" in iteration {first.iteration}"
    others = f" ({len(story.faults)} events in all)" if len(story.faults) > 1 else ""
    return f"{first.what}{where}{others}"


def _late(story: RunStory) -> str:
    spells = _main(story.spells)
    count = times(len(story.iterations), "iteration")
    if not spells and story.faults:
        return ""
    if not spells:
        return f"no link was late in {count}"
    links = sorted({spell.link for spell in spells})
    if len(links) == 1 and len(spells) == 1:
        return f"link {link_name(links[0])} was {_delays(spells)} late for {_for(spells[0], story)}"
    if len(links) == 1:
        total = sum(spell.num_late for spell in spells)
        late = f"{_delays(spells)} late {len(spells)} times, for {times(total, 'iteration')} in all"
        return f"link {link_name(links[0])} was {late}"
    named = f"links {_listed([link_name(link) for link in links])}" if len(links) <= FEW else f"{len(links)} links"
    together = len(spells) == len(links) and all(spell.num_late == len(story.late) for spell in spells)
    how_long = (
        f"for {_for(spells[0], story)}" if together else f"at one time or another, in {len(story.late)} of {count}"
    )
    return f"{named} were {_delays(spells)} late {how_long}"


def _main(spells: Sequence[LatePeriod]) -> Sequence[LatePeriod]:
    """Those that are spoken of: what is small beside the costliest is left out."""
    costliest = max((spell.ms * spell.num_late for spell in spells), default=0.0)
    return [spell for spell in spells if spell.ms * spell.num_late >= SMALL * costliest]


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


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _answer(story: RunStory) -> str:
    ran = [each for each in story.decisions if each.outcome == "ran" and each.first is not None]
    stayed = [each for each in ran if not each.taken_back and each.action != "take back"]
    if not ran and _is_nothing(story):
        return ""
    if not ran:
        return "what runs was never changed" if story.decisions or story.spells else ""
    if not stayed:
        return f"{times(sum(each.taken_back for each in ran), 'change')} of what runs was tried and taken back"
    first = next((each for each in stayed if reaction(story, each) is not None), stayed[0])
    after = reaction(story, first)
    one = len({spell.link for spell in _main(story.spells)}) == 1
    done = DONE.get(first.action, first.action).format(
        it="it was" if one else "links were",
        dispatch=next((each for each in Dispatch if f", {each}" in first.what), Dispatch.FROZEN),
    )
    return done + (f" after {after}" if after is not None else f" in iteration {first.first}")


def reaction(story: RunStory, decided: DecisionOutcome) -> int | None:
    """Late iterations that still ran what ran before, from the first that was late until the switch."""
    if decided.first is None:
        return None
    began = [spell.first for spell in story.spells if spell.first <= decided.made and spell.last >= decided.made]
    start = decided.began if decided.began is not None else max(began, default=None)
    return None if start is None else decided.first - start


def _saved(story: RunStory) -> str:
    """What was saved, as measured; a run that a change made slower is not praised."""
    lost, saved = story.lost, story.saved
    changed = any(each.outcome == "ran" for each in story.decisions)
    slower = [each for each in story.decisions if each.is_slower]
    if slower and saved is not None and saved < 0:
        worst = max(slower, key=lambda each: (each.measured_after or 0.0) / (each.measured_before or 1.0))
        how = f"{short(worst.measured_before or 0.0)} to {short(worst.measured_after or 0.0)} ms an iteration"
        return f"the run became slower by it, from {how}: {seconds(-saved)} more in all"
    if changed and saved is not None and saved < 0:
        return f"changes cost {seconds(-saved)}"
    if not story.spells:
        return ""
    if _is_nothing(story):
        return f"that cost next to nothing ({seconds(max(0.0, lost))})" + (
            "" if changed else ", and nothing was changed"
        )
    if saved is None:
        return f"{seconds(lost)} were lost, and what the changes saved of more could not be measured"
    if saved == 0:
        return f"{seconds(lost)} were lost, none of it saved"
    return f"{seconds(saved)} of {seconds(lost)} lost time was saved, by measured iterations"


def _is_nothing(story: RunStory) -> bool:
    """Whether late links would have cost next to nothing."""
    return story.lost < NOTHING * story.total


def sentence(text: str) -> str:
    """A text with a capital and a full stop."""
    return text[:1].upper() + text[1:] + "."
