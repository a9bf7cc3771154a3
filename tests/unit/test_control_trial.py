"""What is tried and what stays is for clean steps to say, by one sequential test, whatever the noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

import penstock as ps
from penstock.control import (
    Action,
    Configuration,
    Controller,
    Decision,
    Dropped,
    IterationEnded,
    Job,
    Prices,
    Switched,
    Transfers,
    replay,
    run_once,
)
from penstock.control.advice import Obstacle
from penstock.control.changes import USUAL
from penstock.control.configuration import peaks
from penstock.control.steps import BURST, NO_LINKS, Evidence, OpsFrom, Steps, TimedStep
from penstock.control.trial import LATER, MOST, RETURNS, WORSE, Trial, explained
from penstock.dispatch import Dispatch
from tiers import others_nightly

pytestmark = pytest.mark.unit

COSTS = ps.Costs.uniform(4, f=10, i=10, w=10)
ZB = ps.build("zb", 4, 8)
JOB = Job(COSTS, Configuration(ZB, "frozen", (), tuple(peaks(ZB, COSTS))))
WAYS = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
Delays = Mapping[tuple[int, int], float]


class Machine:
    """Runs a controller against made-up steps: links as late as said, steps as long as said."""

    def __init__(self, job: Job = JOB) -> None:
        self.lines: list[str] = []
        self.controller = Controller(job, log=self.lines.append)
        self.made: list[Decision] = []
        self.ms: list[float] = []
        self.ran: list[Configuration] = []

    def run(self, steps: int, delays: Delays, ms: Callable[[Configuration], float], lag: int = 1) -> None:
        """Runs steps; a decision takes `lag` steps to reach all ranks."""
        for _ in range(steps):
            number = len(self.ms)
            waiting = self.controller.waiting
            if waiting is not None and number > waiting.iteration + lag:
                self.controller.feed(Switched(waiting.number))
            now = self.controller.now
            self.ran.append(now)
            self.ms.append(ms(now))
            for link in WAYS:
                late = delays.get(link, delays.get(link[::-1], 0.0))
                self.controller.feed(Transfers.of(link, [(1e6, 30.0 * k, 30.0 * k + 0.5 + late) for k in range(8)]))
            self.made += self.controller.feed(IterationEnded(number, self.ms[-1]))

    def tried(self) -> list[Decision]:
        return [each for each in self.made if each.action is not Action.TAKE_BACK]


def as_simulated(delays: Delays) -> Callable[[Configuration], float]:
    return lambda now: run_once(JOB, now, ps.Links(dict(delays))).makespan


LATE = {(2, 3): 60.0}


def test_a_change_that_helps_stays_and_its_verdict_tells_both_medians() -> None:
    machine = Machine()
    machine.run(12, {}, as_simulated({}))
    machine.run(30, LATE, as_simulated(LATE))
    (decision,) = machine.tried()
    assert machine.made == [decision]
    (verdict,) = machine.controller.verdicts
    assert verdict.kept
    assert verdict.number == decision.number
    assert verdict.before == pytest.approx(decision.ms_now, rel=0.02)
    assert verdict.after == pytest.approx(decision.ms_then, rel=0.02)
    assert replay(machine.lines) == tuple(machine.made)


CHEAP_DISPATCH = replace(JOB, prices=Prices(replan=600.0, delegate=600.0))


@pytest.mark.parametrize("slower", [1.0, 1.1])
def test_regression_a_dispatch_slower_than_simulated_hid_an_order_as_fast_by_simulation(slower: float) -> None:
    """Dynamic dispatch costs nothing to change to, so it comes first. That it falls short is known from its trial."""

    def real(now: Configuration) -> float:
        return as_simulated(LATE)(now) * (slower if now.dispatch.is_dynamic else 1.0)

    machine = Machine(CHEAP_DISPATCH)
    machine.run(12, {}, as_simulated({}))
    machine.run(80, LATE, real)
    first, *second = machine.made
    assert first.configuration.dispatch is Dispatch.DYNAMIC
    assert all(each.kept for each in machine.controller.verdicts)
    if slower == 1:
        assert not second
        return
    assert {each.configuration.dispatch for each in second} == {Dispatch.FROZEN}
    assert "dynamic dispatch takes 1.09 times as long as simulated" in second[0].reason
    assert machine.ms[-1] < machine.ms[second[0].iteration] / 1.05
    assert replay(machine.lines) == tuple(machine.made)


def test_where_simulation_overrates_what_ran_before_the_dispatch_since_is_not_to_blame() -> None:
    """Steps were 100 ms shorter than simulated with the frozen order, and are as simulated with dynamic dispatch."""

    def real(now: Configuration) -> float:
        return as_simulated(LATE)(now) - 100.0 * (now == JOB.start)

    machine = Machine(CHEAP_DISPATCH)
    machine.run(12, {}, as_simulated({}))
    machine.run(80, LATE, real)
    (first,) = machine.made
    assert first.configuration.dispatch is Dispatch.DYNAMIC


def test_that_a_dispatch_falls_short_is_forgotten_where_the_order_that_took_its_place_is_no_faster() -> None:
    """Whatever runs with late links takes a tenth longer than simulated, so no dispatch is to blame."""

    def real(now: Configuration) -> float:
        return as_simulated(LATE)(now) * (1.0 if now == JOB.start else 1.1)

    machine = Machine(CHEAP_DISPATCH)
    machine.run(12, {}, as_simulated({}))
    machine.run(600, LATE, real)
    assert [each.action for each in machine.made].count(Action.TAKE_BACK) == 1
    assert machine.controller.now.dispatch is Dispatch.DYNAMIC


def test_regression_a_rise_that_no_link_explains_led_to_a_change_that_saves_less_than_steps_vary_by() -> None:
    """A link late by little, on a machine that turned busy: the change would save 12 of 440 ms."""
    machine, late = Machine(), {(2, 3): 12.0}
    machine.run(20, {}, as_simulated({}))
    machine.run(40, late, lambda now: as_simulated(late)(now) + 150 + 40 * math.sin(7 * len(machine.ms)))
    assert machine.made == []
    assert any("steps vary by" in str(each) for each in machine.controller.unanswered)


def test_regression_a_link_late_by_little_that_turned_later_was_answered_when_most_steps_were_slow() -> None:
    """The question was open for the little delay, so steps before the great one counted as slow ones."""
    machine, draw, little = Machine(), random.Random(3), {(2, 3): 6.0}
    run_noisily(machine, 20, {}, draw, 0.05)
    run_noisily(machine, 16, little, draw, 0.05)
    assert machine.made == []
    run_noisily(machine, 30, LATE, draw, 0.05)
    assert machine.made[0].iteration <= 36 + 6


def test_regression_evidence_faded_where_a_link_turned_late_soon_after_a_change() -> None:
    """With five usual steps, slow ones are soon like most others: evidence of 10 fell to 1 while steps were slow."""
    steps = Steps(JOB.start)
    for ms in (88.0, 83.0, 104.0, 84.0, 88.0):
        steps.add(TimedStep(ms))
    steps.open(0)
    found = []
    for number in range(40):
        steps.add(TimedStep(280.0 + 10 * math.sin(number)))
        found.append(steps.evidence)
    assert found == sorted(found), "evidence that was reached holds"
    assert found[-1] > 10
    draw = random.Random(1)
    for _ in range(40):
        steps.add(TimedStep(draw.gauss(88.0, 8.0)))
    assert steps.evidence < 3, "steps that are usual again end it"


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_change_that_makes_steps_slower_is_taken_back_within_10_and_not_tried_again(lag: int) -> None:
    """The simulation promises much, and the machine gives the opposite."""

    def real(now: Configuration) -> float:
        return 700.0 if now == JOB.start else 790.0

    machine = Machine()
    machine.run(12, {}, as_simulated({}))
    machine.run(60, LATE, real, lag)
    assert machine.made
    for change, back in zip(machine.made[::2], machine.made[1::2], strict=True):
        assert change.action is not Action.TAKE_BACK
        assert back.action is Action.TAKE_BACK
        assert back.configuration == JOB.start
        assert "takes 790 ms with it" in back.reason
        assert (back.ms_now, back.ms_then) == (790.0, 700.0)
    for change in machine.tried():
        assert 0 < machine.ran.count(change.configuration) <= 10
    what = [(each.action, each.configuration.delegated) for each in machine.tried()]
    assert len(set(what)) == len(what), "the same is not tried twice for the same cause"
    assert machine.controller.now == JOB.start
    assert replay(machine.lines) == tuple(machine.made)


def test_a_change_that_stayed_and_turns_out_slower_is_taken_back_to_what_ran_before() -> None:
    machine = Machine()
    machine.run(12, {}, as_simulated({}))

    def real(now: Configuration) -> float:
        if now == JOB.start:
            return 700.0
        return 400.0 if sum(each != JOB.start for each in machine.ran) < 8 else 790.0

    machine.run(30, LATE, real)
    first, second, *_ = machine.controller.verdicts
    assert (first.kept, second.kept) == (True, False)
    assert first.number == second.number == 1
    back = next(each for each in machine.made if each.action is Action.TAKE_BACK)
    assert back.configuration == JOB.start
    assert replay(machine.lines) == tuple(machine.made)


def test_a_change_that_ranks_cannot_take_back_is_not_taken_back_at_every_step() -> None:
    """What ranks drop leaves them in peace for a while, be it the way back."""
    machine = Machine()
    machine.run(12, {}, as_simulated({}))
    backs: list[int] = []
    for _ in range(60):
        waiting = machine.controller.waiting
        if waiting is not None and waiting.action is Action.TAKE_BACK:
            backs.append(waiting.iteration)
            machine.made += machine.controller.feed(Dropped(waiting.number))
        machine.run(1, LATE, lambda now: 700.0 if now == JOB.start else 790.0, lag=0)
    assert len(backs) >= 3
    peace = USUAL.fall // 2
    assert all(after - before >= peace for before, after in pairwise(backs))


def test_it_is_tried_again_where_the_cause_has_clearly_changed() -> None:
    machine = Machine()
    machine.run(12, {}, as_simulated({}))
    machine.run(40, LATE, lambda now: 700.0 if now == JOB.start else 790.0)
    tried = len(machine.tried())
    later = {(2, 3): 400.0}
    machine.run(30, later, as_simulated(later))
    assert len(machine.tried()) > tried
    assert machine.controller.now != JOB.start


def test_a_burst_that_has_passed_does_not_count_as_an_answer() -> None:
    """Steps were slow, a change was made, then they were as usual by themselves, but for what the change costs."""
    machine = Machine()
    usual = as_simulated({})(JOB.start)
    machine.run(12, {}, lambda now: usual)
    machine.run(BURST + 1, LATE, lambda now: as_simulated(LATE)(JOB.start))
    machine.run(20, {}, lambda now: usual if now == JOB.start else usual * 1.1)
    assert machine.tried()
    assert not machine.controller.verdicts[0].kept
    assert machine.controller.now == JOB.start


def test_a_step_that_is_no_slower_is_no_reason_for_a_change() -> None:
    machine = Machine()
    machine.run(40, {}, lambda now: 400.0)
    machine.run(20, LATE, lambda now: 400.0)
    assert machine.made == []
    (said,) = machine.controller.unanswered
    assert said.obstacle is Obstacle.ABSORBED
    assert "took 400 ms before and take 400 ms since" in str(said)
    assert [link for link, _ in said.cause] == [(2, 3)]


def test_a_link_that_was_late_all_the_time_was_left_so_once_noise_had_raised_another() -> None:
    always = {(2, 3): 60.0}
    ms = as_simulated(always)
    machine = Machine()
    machine.run(5, always, ms)
    machine.run(30, always | {(0, 1): 5.0}, ms)  # steps are no slower for it
    assert machine.tried()
    assert machine.ms[-1] < machine.ms[0]


def test_what_a_trial_could_not_tell_from_noise_is_not_tried_and_the_noise_is_named() -> None:
    draw = random.Random(3)
    usual = as_simulated({})(JOB.start)
    machine = Machine()
    machine.run(40, {}, lambda now: max(50.0, draw.gauss(usual, 110)))
    machine.run(16, LATE, lambda now: max(50.0, draw.gauss(usual + 20, 110)))
    assert machine.made == []
    (said,) = machine.controller.unanswered
    assert said.obstacle in (Obstacle.NOISE, Obstacle.ABSORBED)
    assert "steps took" in said.why


def test_where_nothing_helps_within_memory_what_would_is_said() -> None:
    tight = Configuration(ps.build("zb-h1", 4, 8), "dynamic", (), (4.0, 4.0, 4.0, 4.0))
    job = Job(COSTS, tight, may_replan=False, dispatches=("dynamic",))
    machine = Machine(job)
    late = {(0, 1): 30.0}

    def real(delays: Delays) -> Callable[[Configuration], float]:
        return lambda now: run_once(job, now, ps.Links(dict(delays))).makespan

    machine.run(12, {}, real({}))
    machine.run(8, late, real(late))
    assert machine.made == []
    (said,) = machine.controller.unanswered
    assert said.obstacle is Obstacle.MEMORY
    assert "caps of 4, 4, 4, 4" in said.why
    assert said.now == pytest.approx(real(late)(tight))
    options = {help.option.split()[0]: help for help in said.helps}
    assert "--schedule" in options
    assert all(help.ms < said.simulated * 0.98 for help in said.helps)
    assert "would take" in str(said)


# The trial alone


def normal(draw: random.Random, size: float) -> Callable[[int], float]:
    return lambda step: draw.gauss(1, size)


def heavy(draw: random.Random, size: float) -> Callable[[int], float]:
    return lambda step: 1 + draw.gauss(0, size / 2) + (draw.expovariate(1 / size) if draw.random() < 0.2 else 0.0)


def drift(draw: random.Random, size: float) -> Callable[[int], float]:
    up = draw.choice((-1, 1)) * size / 60
    return lambda step: (1 + up * step) * draw.gauss(1, size / 2)


def bursts(draw: random.Random, size: float) -> Callable[[int], float]:
    slow = [step for step in range(120) if draw.random() < 0.03 for _ in range(1)]
    return lambda step: draw.gauss(1, size / 2) * (1.8 if any(0 <= step - first < 4 for first in slow) else 1.0)


NOISES = (normal, heavy, drift, bursts)


def times_of(ms: list[float], ran: Configuration = JOB.start) -> Steps:
    """Steps that ran before a change, with nothing late among them."""
    steps = Steps(ran)
    for each in ms:
        steps.add(TimedStep(each))
    return steps


@pytest.mark.parametrize("noise", NOISES)
def test_hardly_a_change_stays_that_is_slower_in_250_random_streams_of_each_noise(
    noise: Callable[[random.Random, float], Callable[[int], float]],
) -> None:
    """True effects from 30% faster to 50% slower: no change whose measured steps are over 2% slower stays at its
    verdict; of those that are truly slower hardly any, where noise does not depend on time; and what makes steps much
    faster mostly does."""
    helped = stayed = harmed = left = 0
    for seed in range(250):
        draw = random.Random(f"{noise.__name__} {seed}")
        step_of = noise(draw, draw.uniform(0.01, 0.25))
        effect = draw.choice((-0.3, -0.1, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5))
        times = times_of([100 * step_of(step) for step in range(24)])
        trial = Trial(1, times, 30.0, {})
        with_it: list[float] = []
        kept = True
        while kept and len(with_it) < LATER:
            step = 24 + len(with_it)
            with_it.append(100 * (1 + effect) * step_of(step))
            verdict = trial.add(step, TimedStep(with_it[-1]))
            if verdict is not None:
                kept = verdict.kept
                assert not (kept and verdict.after > (1 + WORSE) * verdict.before), (seed, effect)
            assert trial.verdict is not None or len(with_it) < MOST
        if effect > WORSE:
            harmed, left = harmed + 1, left + kept
        if effect == -0.3:
            helped, stayed = helped + 1, stayed + kept
    assert stayed > 0.7 * helped
    assert noise not in (normal, heavy) or left <= 0.03 * harmed


@pytest.mark.parametrize("noise", NOISES)
def test_no_change_stays_that_is_slower_where_links_change_in_every_step(
    noise: Callable[[random.Random, float], Callable[[int], float]],
) -> None:
    """Links make steps up to twice as long. Simulation knows what ran before; of what runs since it may be wrong.
    No change stays that makes the same step, with the same links, over 2% slower than noise explains, but for a
    few where bursts of steps drown everything."""
    then = Configuration(ZB, "dynamic", (), JOB.start.caps)
    helped = stayed = neutral = left = wrong = 0
    for seed in range(250):
        draw = random.Random(f"{noise.__name__} {seed}")
        size = draw.uniform(0.002, 0.05)
        step_of = noise(draw, size)
        effect = draw.choice((-0.3, -0.1, 0.0, 0.05, 0.1, 0.2, 0.5))  # what is true
        said = draw.choice((effect, -0.3, -0.1, 0.0))  # what simulation says
        times, trial = Steps(JOB.start), None
        kept = True
        for step in range(24 + 1 + LATER):
            level = 100 * draw.uniform(1, 2)

            def simulated(
                configuration: Configuration,
                sooner: Delays = NO_LINKS,
                ops: OpsFrom = "verified",
                slowed: float = 1.0,
                level: float = level,
                said: float = said,
            ) -> float:
                return level if configuration == JOB.start else level * (1 + said)

            if step < 24:
                times.add(TimedStep(level * step_of(step), simulated))
                continue
            taken = TimedStep(level * (1 + effect) * step_of(step), simulated)
            trial = trial or Trial(1, times, 30.0, {}, then, links_changed=draw.random() < 0.5)
            if (verdict := trial.add(step, taken)) is not None:
                kept = verdict.kept
                if not kept:
                    break
        wrong += kept and effect > WORSE + 2 * size
        if effect == said == -0.3:
            helped, stayed = helped + 1, stayed + kept
        if effect == said == 0.0 and noise in (normal, heavy):
            neutral, left = neutral + 1, left + kept
    assert stayed > helped / 3
    assert left >= neutral / 2
    assert wrong <= (10 if noise is bursts else 0)


@pytest.mark.parametrize("right", [True, False])
def test_steps_with_other_links_are_compared_by_simulation_only_where_that_explains_them(right: bool) -> None:
    times = Steps(JOB.start)
    for step in range(8):
        ms = 100.0 + 10 * step
        times.add(TimedStep(ms, lambda *_, ms=ms, **__: ms if right else 100.0))
    trial = Trial(1, times, 30.0, {}, Configuration(ZB, "dynamic", (), JOB.start.caps), links_changed=True)
    said = []
    for step in range(MOST):
        taken = TimedStep(150.0, lambda ran, *_, **__: 220.0 if ran == JOB.start else 150.0)
        said.append(trial.add(step, taken))
    verdict = next(each for each in said if each is not None)
    assert verdict.kept is right


def test_a_change_on_trial_while_another_link_turns_late_is_judged_by_what_would_have_run_then() -> None:
    """Steps with the change are slower than those before, which had other links; simulation says what helps now."""
    machine = Machine()
    first, both = {(0, 1): 40.0}, {(0, 1): 40.0, (2, 3): 60.0}
    machine.run(12, {}, as_simulated({}))
    machine.run(BURST + 1, first, as_simulated(first))
    assert len(machine.tried()) == 1
    machine.run(20, both, as_simulated(both))
    then = {each.number: each.configuration for each in machine.made}
    for verdict in machine.controller.verdicts:
        helps = as_simulated(both)(then[verdict.number]) < as_simulated(both)(JOB.start)
        assert verdict.kept is helps, machine.controller.verdicts
    assert machine.ms[-1] < as_simulated(both)(JOB.start)


@pytest.mark.parametrize("added", [20.0, 40.0])
def test_what_delegates_add_is_not_laid_to_the_links(added: float) -> None:
    """Steps are explained by the delays of their messages, which delegates make later and not the links."""
    start = Configuration(ZB, Dispatch.DYNAMIC, (), JOB.start.caps)
    machine, draw = Machine(Job(COSTS, start, transport="blocking:1", may_replan=False)), random.Random(7)
    instead = []
    for step in range(80):
        if step % 4 == 0:
            late = {link: draw.uniform(0, 10 if step < 20 else 80) for link in WAYS[::2]}
        waiting = machine.controller.waiting
        ran = machine.controller.now if waiting is None else waiting.configuration
        told = {link: ms + added * (link in ran.delegated) for link, ms in late.items()}
        machine.run(
            1, told, lambda now, told=told: run_once(machine.controller.job, now, ps.Links(told)).makespan, lag=0
        )
        instead.append(run_once(machine.controller.job, start, ps.Links(late)).makespan)
    assert any(each.configuration.delegated for each in machine.tried())
    assert any(not verdict.kept for verdict in machine.controller.verdicts)
    assert sum(machine.ms) <= 1.15 * sum(instead)


def on_a_machine(seed: int, noise: float, gain: float, slows: float = 1.0) -> bool:
    """Whether a change stays that makes steps shorter by a share, and ops slower by a factor.

    A link has turned late, and the change answers that. Ops take longer and shorter for reasons of the machine's own:
    by a walk, and in spells. None begins or ends around the switch, where the change itself might have done it.
    """
    draw, before, lag = random.Random(f"{seed} {noise} {gain}"), 24 + (3, 5, 9, 16)[seed % 4], 4
    walk, spell, steps, preparing = draw.gauss(0, noise), 0.0, Steps(JOB.start), []
    then, trial = Configuration(ZB, "dynamic", (), JOB.start.caps), None
    for step in range(before + lag + LATER):
        walk = 0.95 * walk + draw.gauss(0, noise) * math.sqrt(1 - 0.95**2)
        if draw.random() < 1 / 60 and noise and not before - 4 <= step < before + lag + 4:
            spell = draw.choice((0.0, 0.3, 0.6))
        is_new, late = step >= before + lag, 1.3 if step >= 24 else 1.0
        load = math.exp(walk + spell) * (slows if is_new else 1.0)

        def simulated(
            ran: Configuration,
            sooner: Delays = NO_LINKS,
            ops: OpsFrom = "verified",
            slowed: float = 1.0,
            load: float = load,
            late: float = late,
        ) -> float:
            taken = load / slowed if ops == "step" else 1.0
            return 600 * late * taken * (1 if ran == JOB.start else 1 - gain)

        ms = 100 + simulated(then if is_new else JOB.start, ops="step") * math.exp(draw.gauss(0, 0.03))
        taken = TimedStep(ms, simulated, None, load)
        if step == before:
            steps.open(before - 24)
        if step < before:
            steps.add(taken)
        elif not is_new:
            preparing.append(taken)
        else:
            trial = trial or Trial(1, steps, 600 * gain, {}, then, preparing=preparing)
            verdict = trial.add(step, taken)
            if verdict is not None and not verdict.kept:
                return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("noise", others_nightly([0.0, 0.1, 0.2], [0.1]))
def test_regression_a_change_that_helped_was_taken_back_because_the_machine_was_busier_than_before(
    noise: float,
) -> None:
    """Steps before and since had other op times, and were compared as they were: of changes that saved 15%, 4 in 10
    were taken back. Now hardly 1 in 100 is, and the verdict says what a step would take without the change."""
    backs = sum(not on_a_machine(seed, noise, gain=0.15) for seed in range(150))
    assert backs <= 1
    assert not any(on_a_machine(seed, noise, gain=-0.1) for seed in range(30)), "what harms is still found"


def test_a_change_that_slows_ops_by_more_than_it_saves_is_taken_back() -> None:
    """Delegates may take a core from the ranks: ops measured since the switch must not excuse the change."""
    assert not any(on_a_machine(seed, 0.0, gain=0.1, slows=1.3) for seed in range(30))


def test_regression_drifting_load_hid_that_a_change_slowed_ops() -> None:
    """Of changes that slow ops by 30% and save 10%, 47% stayed: loads before the change differed by as much. And 6%
    of those that slow ops by 10% and save 30% were taken back, for they were compared with ops of another load.
    """
    assert sum(on_a_machine(seed, 0.1, gain=0.1, slows=1.3) for seed in range(60)) <= 12
    assert sum(not on_a_machine(seed, 0.05, gain=0.3, slows=1.1) for seed in range(60)) <= 1


def test_a_verdict_says_what_a_step_would_take_without_the_change() -> None:
    steps, then = Steps(JOB.start), Configuration(ZB, "dynamic", (), JOB.start.caps)

    def taken(ms: float, load: float) -> TimedStep:
        return TimedStep(ms, lambda ran, *_, **__: 1000.0 * load * (1.0 if ran == JOB.start else 0.8), None, load)

    for load in (1.0, 1.1, 1.2, 1.3) * 4:
        steps.add(taken(1000 * load, load))
    trial = Trial(5, steps, 200.0, {}, then)
    said = [trial.add(step, taken(800 * load, load)) for step, load in enumerate((1.5, 1.6, 1.5, 1.6, 1.5, 1.6))]
    verdict = next(each for each in said if each is not None)
    assert verdict.kept
    assert verdict.after > verdict.before
    assert verdict.without == pytest.approx(verdict.after / 0.8, rel=0.05)
    assert f"a step would take {verdict.without:.4g} ms without it" in str(verdict)


def test_steps_that_do_not_differ_are_explained_by_nothing() -> None:
    assert not explained([(400.0, 584.0)] * 16)
    assert not explained([(400.0, 280.0)] * 8 + [(402.0, 282.0)] * 8)
    varied = [(400.0 + 20 * k, 300.0 + 20 * k) for k in range(8)]
    assert explained(varied)
    assert not explained(varied[:4])


def test_a_change_that_turns_out_slower_is_taken_back_later() -> None:
    trial = Trial(1, times_of([100.0, 101.0, 99.0] * 4), 10.0, {})
    said = [trial.add(step, TimedStep(90.0 if step < 20 else 110.0)) for step in range(LATER)]
    first, second = [verdict for verdict in said if verdict is not None]
    assert first.kept
    assert not second.kept
    assert second.num_after < 35


def test_going_back_must_be_no_slower() -> None:
    for ms, kept in ((100.0, True), (101.9, True), (103.0, False)):
        trial = Trial(1, times_of([100.0] * 10), 0.0, {})
        (verdict,) = [said for step in range(RETURNS) if (said := trial.add(step, TimedStep(ms))) is not None]
        assert verdict.kept is kept


def test_steps_before_and_since_an_onset_are_told_apart_and_the_first_slow_one_is_left_out() -> None:
    times = times_of([100.0, 101.0, 99.0, 100.0, 150.0, 200.0, 201.0, 203.0])
    times.open(4)
    assert [step.ms for step in times.usual] == [100.0, 101.0, 99.0, 100.0]
    assert times.level == 201.0
    assert times.rise == 101.0
    assert times.evidence > 3
    times.open(1)  # another link turns late: steps were slower already
    assert times.calm == 100.0
    times.close()
    assert (times.level, times.rise) == (100.0, 0.0)


# The test alone


@pytest.mark.parametrize("noise", [normal, heavy, bursts])
@pytest.mark.parametrize("num", [3, 12, 32])
def test_evidence_of_nothing_is_as_rare_as_its_size(
    noise: Callable[[random.Random, float], Callable[[int], float]], num: int
) -> None:
    reached = total = 0
    for seed in range(300):
        draw = random.Random(f"{noise.__name__} {num} {seed}")
        step_of = noise(draw, 0.15)
        test = Evidence([step_of(step) for step in range(num)])
        for step in range(40):
            test.add(step_of(num + step))
            total += 1
            if test.value >= 30:
                reached += 1
                break
    assert reached <= 2 * total / 30


def test_evidence_adds_up_and_wild_values_count_no_more_than_high_ones() -> None:
    calm = [97.0, 103.0, 99.0, 101.0, 98.0, 100.0, 102.0, 96.0]
    high, wild = Evidence(calm), Evidence(calm)
    values = []
    for step in range(10):
        high.add(120.0 + step)
        wild.add(1e6 + step)
        values.append(high.value)
    assert values == sorted(values)
    assert wild.value == high.value > 30
    assert Evidence(calm, [120.0] * 8, sign=-1).value == 1.0
    assert Evidence([100.0] * 12, [100.0] * 12).value == 1.0


def run_noisily(machine: Machine, steps: int, delays: Delays, draw: random.Random, noise: float) -> None:
    for _ in range(steps):
        machine.run(1, delays, lambda now: as_simulated(delays)(now) * math.exp(draw.gauss(0, noise)))


@pytest.mark.parametrize("seed", range(3))
def test_row_5_a_question_stays_open_until_evidence_adds_up_on_a_busy_machine(seed: int) -> None:
    """A late link on a machine whose steps vary by a third was said once to be no slower, and never asked again."""
    machine, draw = Machine(), random.Random(seed)
    run_noisily(machine, 20, {}, draw, 0.35)
    run_noisily(machine, 80, LATE, draw, 0.35)
    assert machine.controller.now.delegated == ((2, 3),)
    assert any(verdict.kept for verdict in machine.controller.verdicts)
    assert replay(machine.lines) == tuple(machine.made)


@pytest.mark.parametrize("seed", range(5))
def test_a_burst_of_three_steps_leads_to_nothing(seed: int) -> None:
    machine, draw = Machine(), random.Random(seed)
    for _ in range(3):
        run_noisily(machine, 20, {}, draw, 0.05)
        run_noisily(machine, BURST, LATE, draw, 0.05)
    assert machine.made == []


def test_row_4_steps_in_which_a_change_is_prepared_count_on_neither_side_and_are_charged_to_it() -> None:
    """The step in which delegates started took three times as long and counted as one before the change."""
    machine = Machine()
    machine.run(12, {}, as_simulated({}))

    def real(now: Configuration) -> float:
        slow = machine.controller.waiting is not None or (machine.ran.count(now) == 1 and now != JOB.start)
        return as_simulated(LATE)(now) + (1000.0 if slow else 0.0)

    machine.run(30, LATE, real, lag=2)
    (verdict,) = machine.controller.verdicts
    assert verdict.before == as_simulated(LATE)(JOB.start)
    assert verdict.after == as_simulated(LATE)(machine.controller.now)
    assert min(verdict.num_before, verdict.num_after) >= 3
    assert verdict.paid == machine.controller.paid == pytest.approx(3000.0, abs=500.0)
    assert "preparing it cost" in str(verdict)


def test_row_3_a_rise_that_no_link_explains_is_said_once_with_its_size() -> None:
    machine = Machine()
    machine.run(20, {}, lambda now: 255.0)
    machine.run(40, {}, lambda now: 1060.0)
    (said,) = machine.controller.unanswered
    assert (said.obstacle, said.before, said.now, said.cause) == (Obstacle.UNKNOWN, 255.0, 1060.0, ())
    assert "255 ms before and take 1060 ms now (316% more)" in str(said)
    machine.run(20, {}, lambda now: 2000.0)
    assert len(machine.controller.unanswered) == 2
    assert machine.made == []


def test_row_3_a_late_link_that_explains_less_than_half_is_named_beside_the_unknown_cause() -> None:
    machine = Machine()
    machine.run(20, {}, as_simulated({}))
    machine.run(40, LATE, lambda now: as_simulated(LATE)(now) + 1000.0)
    said = [each for each in machine.controller.unanswered if each.obstacle is Obstacle.UNKNOWN]
    assert len(said) == 1
    assert [link for link, _ in said[0].cause] == [(2, 3)]


def test_row_6_of_links_that_are_all_a_bit_late_the_one_that_rose_moves_and_is_named_with_the_dispatch() -> None:
    usual = dict.fromkeys(WAYS[::2], 4.0)
    late = usual | {(2, 3): 60.0}
    machine = Machine()
    machine.run(12, usual, as_simulated(usual))
    machine.run(30, late, as_simulated(late))
    (decision,) = machine.made
    assert decision.configuration.delegated == ((2, 3),)
    assert "link 2:3 goes by delegates" in decision.reason
    dispatch = decision.configuration.dispatch
    assert dispatch is JOB.start.dispatch or f"dispatch becomes {dispatch.value}" in decision.reason
