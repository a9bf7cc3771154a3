"""Every change is on trial: what steps show of it decides whether it stays, whatever the noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median

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
    Switched,
    Transfers,
    replay,
    run_once,
)
from penstock.control.advice import Obstacle
from penstock.control.configuration import peaks
from penstock.control.trial import (
    EARLY,
    LATER,
    NO_LINKS,
    STEPS,
    WORSE,
    ChangeTrial,
    SimulationResidual,
    StepTimes,
    TimedStep,
    explained,
)
from penstock.dispatch import Dispatch

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
    assert verdict.calm == as_simulated({})(JOB.start)
    assert replay(machine.lines) == tuple(machine.made)


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
        assert "790 with it" in back.reason
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
    peace = machine.controller.sensitivity.fall // 2
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
    machine.run(3, LATE, lambda now: as_simulated(LATE)(JOB.start))
    machine.run(20, {}, lambda now: usual if now == JOB.start else usual * 1.1)
    assert machine.tried()
    assert not machine.controller.verdicts[0].kept
    assert "has passed" in machine.controller.verdicts[0].why
    assert machine.controller.now == JOB.start


def test_a_step_that_is_no_slower_is_no_reason_for_a_change() -> None:
    machine = Machine()
    machine.run(40, {}, lambda now: 400.0)
    machine.run(20, LATE, lambda now: 400.0)
    assert machine.made == []
    (said,) = machine.controller.unanswered
    assert said.obstacle is Obstacle.ABSORBED
    assert "400 ms before, 400 since" in str(said)
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
    machine.run(12, LATE, lambda now: max(50.0, draw.gauss(usual + 330, 110)))
    assert machine.made == []
    (said,) = machine.controller.unanswered
    assert said.obstacle in (Obstacle.NOISE, Obstacle.ABSORBED)
    assert "noise of" in said.why


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
    assert "it would be" in str(said)


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


@pytest.mark.parametrize("noise", NOISES)
def test_no_change_stays_that_is_slower_in_250_random_streams_of_each_noise(
    noise: Callable[[random.Random, float], Callable[[int], float]],
) -> None:
    """True effects from 30% faster to 50% slower: no change whose measured steps are over 2% slower stays; where
    noise does not depend on time none that is truly slower does, and what makes steps much faster often does."""
    helped = stayed = 0
    for seed in range(250):
        draw = random.Random(f"{noise.__name__} {seed}")
        step_of = noise(draw, draw.uniform(0.01, 0.25))
        effect = draw.choice((-0.3, -0.1, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5))
        times = StepTimes()
        for step in range(24):
            times.add(TimedStep(100 * step_of(step)))
        trial = ChangeTrial(1, times, 30.0, {})
        with_it: list[float] = []
        kept = True
        while kept and len(with_it) <= LATER:
            step = 24 + len(with_it)
            with_it.append(100 * (1 + effect) * step_of(step))
            verdict = trial.add(step, TimedStep(with_it[-1]), True)
            if verdict is not None:
                kept = verdict.kept
            assert verdict is not None or len(with_it) != 1 + STEPS or not trial.is_open
        assert kept or len(with_it) in (1 + EARLY, 1 + STEPS, 1 + LATER)
        assert not (kept and median(with_it[1:]) > (1 + WORSE) * median(times.now)), (seed, effect)
        assert not (kept and effect > WORSE and noise in (normal, heavy)), (seed, effect)
        if effect == -0.3:
            helped += 1
            stayed += kept
    assert stayed > helped / 3


@pytest.mark.parametrize("noise", NOISES)
def test_no_change_stays_that_is_slower_where_links_change_in_every_step(
    noise: Callable[[random.Random, float], Callable[[int], float]],
) -> None:
    """Links make steps up to twice as long. Simulation knows what ran before; of what runs since it may be wrong.
    No change stays that makes the same step, with the same links, over 2% slower than noise explains."""
    then = Configuration(ZB, "dynamic", (), JOB.start.caps)
    helped = stayed = neutral = left = 0
    for seed in range(250):
        draw = random.Random(f"{noise.__name__} {seed}")
        size = draw.uniform(0.002, 0.05)
        step_of = noise(draw, size)
        effect = draw.choice((-0.3, -0.1, 0.0, 0.05, 0.1, 0.2, 0.5))  # what is true
        said = draw.choice((effect, -0.3, -0.1, 0.0))  # what simulation says
        times = StepTimes(JOB.start)
        trial = ChangeTrial(1, times, 30.0, {}, then)
        trial.void = draw.random() < 0.5
        kept = True
        for step in range(24 + 1 + LATER):
            level = 100 * draw.uniform(1, 2)

            def simulated(
                configuration: Configuration,
                late: bool = True,
                sooner: Delays = NO_LINKS,
                level: float = level,
                said: float = said,
            ) -> float:
                level = level if late else 100.0
                return level if configuration == JOB.start else level * (1 + said)

            if step < 24:
                times.add(TimedStep(level * step_of(step), simulated))
                continue
            taken = TimedStep(level * (1 + effect) * step_of(step), simulated)
            if (verdict := trial.add(step, taken, True)) is not None:
                kept = verdict.kept
                if not kept:
                    break
        assert not (kept and effect > WORSE + 2 * size), (seed, effect, said)
        if effect == said == -0.3:
            helped, stayed = helped + 1, stayed + kept
        if effect == said == 0.0 and noise in (normal, heavy):
            neutral, left = neutral + 1, left + kept
    assert stayed > helped / 3
    assert left >= neutral / 2


@pytest.mark.parametrize("right", [True, False])
def test_a_trial_in_which_links_changed_is_told_by_simulation_only_where_that_explains_the_steps(right: bool) -> None:
    times = StepTimes(JOB.start)
    for step in range(8):
        ms = 100.0 + 10 * step
        times.add(TimedStep(ms, lambda *_, ms=ms, **__: ms if right else 100.0))
    trial = ChangeTrial(1, times, 30.0, {}, Configuration(ZB, "dynamic", (), JOB.start.caps))
    trial.void = True
    said = []
    for step in range(1 + STEPS):
        taken = TimedStep(150.0, lambda ran, *_, **__: 220.0 if ran == JOB.start else 150.0)
        said.append(trial.add(step, taken, True))
    (verdict,) = [each for each in said if each is not None]
    assert verdict.kept is right
    assert ("the measured 70" if right else "links changed") in verdict.why


def test_a_link_that_turns_late_while_a_change_is_on_trial_does_not_have_it_taken_back() -> None:
    """What ran before would be slower still, and what runs is as much slower as delays explain."""
    machine = Machine()
    first, both = {(0, 1): 40.0}, {(0, 1): 40.0, (2, 3): 60.0}
    machine.run(12, {}, as_simulated({}))
    machine.run(3, first, as_simulated(first))
    assert len(machine.tried()) == 1
    machine.run(20, both, as_simulated(both))
    assert machine.controller.verdicts[0].kept, machine.controller.verdicts
    assert machine.ms[-1] < as_simulated(both)(JOB.start)


@pytest.mark.parametrize("added", [20.0, 40.0])
def test_what_delegates_add_is_not_laid_to_the_links(added: float) -> None:
    """Steps are explained by the delays of their messages, which delegates make later and not the links."""
    start = Configuration(ZB, Dispatch.DYNAMIC, (), JOB.start.caps)
    machine, draw = Machine(Job(COSTS, start, depth=1, may_replan=False)), random.Random(7)
    for step in range(80):
        if step % 4 == 0:
            late = {link: draw.uniform(0, 10 if step < 20 else 80) for link in WAYS[::2]}
        waiting = machine.controller.waiting
        ran = machine.controller.now if waiting is None else waiting.configuration
        told = {link: ms + added * (link in ran.delegated) for link, ms in late.items()}
        machine.run(
            1, told, lambda now, told=told: run_once(machine.controller.job, now, ps.Links(told)).makespan, lag=0
        )
    assert any(each.configuration.delegated for each in machine.tried())
    assert machine.controller.now.delegated == ()
    first = next(number for number, ran in enumerate(machine.ran) if ran.delegated)
    assert sum(bool(ran.delegated) for ran in machine.ran[first : first + 12]) <= 8


def test_what_is_taken_back_while_links_changed_is_held_against_steps_with_these_links() -> None:
    times = StepTimes(JOB.start)
    for _ in range(12):
        times.add(TimedStep(100.0))
    times.changed(2, True)
    times.resume()
    assert times.now == ()
    assert times.are_enough
    times.add(TimedStep(250.0))
    times.add(TimedStep(260.0))
    assert times.now == (260.0,)
    assert times.rise == 160.0


def test_steps_that_do_not_differ_are_explained_by_nothing() -> None:
    assert explained([(400.0, 584.0)] * 16) is None
    assert explained([(400.0, 280.0)] * 8 + [(402.0, 282.0)] * 8) is None
    varied = [(400.0 + 20 * k, 300.0 + 20 * k) for k in range(8)]
    assert explained(varied) == SimulationResidual(100.0, 0.0)
    assert explained(varied[:4]) is None


def test_a_change_that_turns_out_slower_is_taken_back_later() -> None:
    times = StepTimes()
    for _ in range(10):
        times.add(TimedStep(100.0))
    trial = ChangeTrial(1, times, 10.0, {})
    said = [trial.add(step, TimedStep(90.0 if step < 7 else 110.0), True) for step in range(LATER + 3)]
    first, second = [verdict for verdict in said if verdict is not None]
    assert first.kept
    assert not second.kept
    assert second.num_after == LATER


def test_going_back_must_be_no_slower() -> None:
    for ms, kept in ((100.0, True), (101.9, True), (103.0, False)):
        times = StepTimes()
        for _ in range(10):
            times.add(TimedStep(100.0))
        trial = ChangeTrial(1, times, 0.0, {})
        (verdict,) = [said for step in range(1 + STEPS) if (said := trial.add(step, TimedStep(ms), True)) is not None]
        assert verdict.kept is kept


def test_steps_before_and_since_a_change_are_told_apart_and_the_first_slow_one_is_left_out() -> None:
    times = StepTimes()
    for ms in (100.0, 101.0, 99.0, 150.0, 200.0):
        times.add(TimedStep(ms))
    times.changed(2, True)
    assert times.calm == (100.0, 101.0, 99.0)
    assert times.now == (200.0,)
    assert times.rise == 100.0
    times.add(TimedStep(202.0))
    times.changed(3, True)  # the other direction, verified a step later: one event
    assert times.now == (200.0, 202.0)
    for _ in range(20):
        times.add(TimedStep(202.0))
    times.changed(1, False)
    assert set(times.calm) >= {202.0}
    assert times.rise is None
