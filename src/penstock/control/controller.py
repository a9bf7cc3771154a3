"""The controller: events in, decisions out. It knows no clock, thread or socket, so its log replays.

Transfers, OpTimes      measure     each direction of each link, each stage, on its own (watches.py)
IterationEnded    --->  verify      what is late now, since when (changes.py, measured.py)
                        ask         are steps slower since then (steps.py)
                        choose      the best candidate that is worth its price (decide.py)
                        doubt       is the evidence enough for a trial (trial.py)
Probed            --->  move        nodes of a mesh to where a late link costs least (orchestrator.py)
Decision          <---  propose     number and digest; all ranks switch or none does
Switched, Dropped --->  from then on that is what runs, or it never was
IterationEnded    --->  try         are steps faster than before (trial.py); if not, what ran before runs again
Unanswered        <---  say so      something is late or steps are slow, and nothing is changed: why (advice.py)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median

from penstock.control import events
from penstock.control.advice import Help, Obstacle, Unanswered, causes_in_words, what_would_help
from penstock.control.changes import MOST_FALL, USUAL
from penstock.control.configuration import Configuration, Job, fits, in_host, peaks
from penstock.control.decide import (
    Action,
    Candidate,
    Decision,
    Measured,
    candidates,
    choose,
    predict,
    reason_of,
    score,
)
from penstock.control.events import ControlError, Event, Link, undirected
from penstock.control.log import event_line, header, outcome_line
from penstock.control.measured import LATER, JobMonitor
from penstock.control.orchestrator import Orchestrator
from penstock.control.steps import BURST, CLOSELY, NO_LINKS, SLOWER_STEP, UNEXPLAINED, OpsFrom, Steps, TimedStep
from penstock.control.trial import Question, Trial, Verdict, what_of
from penstock.control.watches import Cause, ComputeChange, Factors, LinkChange, factors_of, load_of, scaled
from penstock.cost import Links
from penstock.dispatch import Dispatch
from penstock.schedule import Schedule, check

_AGES = (3, 8, 16, *(2**power for power in range(5, 24)))
"""Iterations since the last change after which the choice is made again, since more is known then. Where nothing is
late, only the first three count.
"""
_SAY = 12
"""Iterations after which it is reported that steps do not call for an answer yet; other reasons at once."""
_AGAIN = 1.5
"""How many times the level that was reported steps must take to be reported again."""


class Controller:
    """Decides what a job runs. The same events give the same decisions.

    After a decision it waits for `Switched` or `Dropped` before it makes another. After `Dropped` it decides nothing
    for some iterations, unless a link dies. Steps between a decision and its switch are no evidence,
    nor is the first one after it, nor are the job's starting steps. All other steps are called clean.

    Args:
        job: what runs at the start, its costs, and what may change.
        log: called with each line of the log, which `replay` reads; no log where not given.

    Attributes:
        job: as given.
        now: the configuration that runs.
        lost: ms lost so far, by simulation, because the best candidate did not run. Together the prices of all
            decisions never exceed it, but for those that a dead link forced.
        paid: ms that steps took longer than clean ones while changes were being prepared, as measured.
        changes: verified changes of links and stages, each with the iteration in which it was verified.
        verdicts: what measured steps said of decisions.
        unanswered: causes for which nothing was changed, and why.
        waiting: the decision of which it is not yet known whether all ranks run it.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> controller = ps.control.Controller(job)
        >>> controller.feed(ps.control.IterationEnded(0, 200.0)), controller.now == start
        ((), True)
    """

    def __init__(self, job: Job, log: Callable[[str], object] | None = None) -> None:
        self.job = job
        self.now = job.start
        self.lost = self.paid = 0.0
        self.changes: list[tuple[int, LinkChange | ComputeChange]] = []
        self.verdicts: list[Verdict] = []
        self.unanswered: list[Unanswered] = []
        self._log = log
        self._monitor = JobMonitor(job)
        self._nodes = None if job.mesh is None else Orchestrator(job, job.mesh)
        self._question = Question(job.least_gain)
        self._steps = Steps(job.start)
        self._preparing: list[TimedStep] = []
        self._is_first = False
        self._trial: Trial | None = None
        self._proven = self._fallback = job.start
        self._tried: tuple[Action, object] = Action.KEEP, ()
        self._offered: tuple[Schedule, ...] = ()
        self._iteration, self._ms, self._age, self._number = -1, 0.0, 0, 0
        self._due, self._rate, self._spent, self._looked_at = False, 0.0, 0.0, -1
        self._measured: Measured | None = None
        self._shortfalls: dict[Dispatch, float] = {}
        self._scored: tuple[Candidate, ...] = ()
        self.waiting: Decision | None = None
        self._delegated_at = self._quiet_until = self._switched_at = -(10**9)
        self._moved_for: Mapping[Link, float] = NO_LINKS
        self._said: list[Verdict | Unanswered] = []
        self._told: set[tuple[Obstacle, frozenset[Link]]] = set()
        self._told_level = 0.0
        if log is not None:
            log(header(job))

    @property
    def is_calm(self) -> bool:
        """Whether the time of an iteration alone says enough. Nothing is suspected, prepared or on trial then, and
        what is late has made no step slower for so long that only slower steps would lead to an answer.
        """
        busy = self.waiting is not None or self._failure is not None or self._is_on_trial
        if busy or self._monitor.is_suspicious or (self._nodes is not None and self._nodes.excess):
            return False
        if not self._monitor.late and not self._steps.is_open:
            return True
        is_long = self._steps.num_open > CLOSELY and not self.now.delegated
        return is_long and self._question.too_early(self._steps, self._iteration) is not None

    @property
    def wants_probes(self) -> bool:
        """Whether links between nodes should be probed soon: steps look slower for no known cause."""
        steps = self._steps
        if self._nodes is None or steps.is_open:
            return False
        return steps.num_slower <= 2 * CLOSELY if steps.num_slower else steps.looks_slower

    @property
    def predicted_mesh(self) -> float:
        """The predicted time of an iteration over the mesh (ms), with its rings, with the links as probed; 0
        without a mesh.
        """
        return 0.0 if self._nodes is None else self._nodes.iteration(self.now)

    def plan_problem(self) -> tuple[Job, Links] | None:
        """The problem of a search for a better plan: the job with costs as measured, and the delays that matter. None
        where orders may not change, no link became late, or the late links have just changed.
        """
        if not self.job.may_replan or not self._monitor.rises or self._age < self._steps.burst:
            return None
        job, measured = self._as_measured()
        return job, job.late(measured.typical)

    def would_gain(self, schedule: Schedule) -> bool:
        """Whether steps would be shorter with a schedule, by more than a trial could take for noise."""
        job, measured = self._as_measured()
        ways = [replace(self.now, schedule=schedule, dispatch=each) for each in job.dispatches]
        fitting = (each for each in (self.now, *ways) if fits(each, job.costs))
        now, *then = (predict(job, each, measured.scenarios) * self._shortfall_of(each) for each in fitting)
        return bool(then) and now - min(then) >= self._question.least(self._steps)

    @property
    def search(self) -> Callable[[], events.Reranked] | None:
        """The search for better places of the nodes to be made now, anywhere: `feed(search())` brings the answer, at
        any time. None where there is nothing to search, or the answer is known.
        """
        return None if self._nodes is None else self._nodes.search

    def feed(self, event: Event) -> tuple[Decision, ...]:
        """Takes an event; returns the decisions it leads to, none or one.

        Raises:
            ControlError: a rank that is not there, iterations that do not rise, or news of a decision that is not
                waiting.
        """
        self._said = []
        decision = self._take(event)
        self.verdicts += [said for said in self._said if isinstance(said, Verdict)]
        self.unanswered += [said for said in self._said if isinstance(said, Unanswered)]
        made = () if decision is None else (decision,)
        if self._log is not None:
            for line in (event_line(event), *map(outcome_line, (*self._said, *made))):
                self._log(line)
        return made

    def _take(self, event: Event) -> Decision | None:
        if isinstance(event, events.Transfers | events.OpTimes):
            self._monitor.feed(event)
            if self._nodes is not None and isinstance(event, events.Transfers):
                self._nodes.weigh(event)
            return None
        if isinstance(event, events.IterationEnded):
            return self._end_iteration(event)
        if isinstance(event, events.Probed | events.Reranked):
            return self._probe(event)
        if isinstance(event, events.LinkDown | events.LinkUp):
            self._monitor.note_path(event)
            if isinstance(event, events.LinkUp):  # what comes back may go again: it is left in peace for a while
                self._delegated_at = self._iteration
        elif isinstance(event, events.Switched):
            self._switch(self._ended(event.number))
        elif isinstance(event, events.Dropped):
            self._ended(event.number)
            self._charge(None)
            self._quiet_until = self._iteration + USUAL.fall // 2
        else:
            check(event.schedule)
            self._offered = (*self._offered, event.schedule)
        self._due = self._due or not isinstance(event, events.LinkUp)
        return self._forced()

    # Iterations.

    def _end_iteration(self, event: events.IterationEnded) -> Decision | None:
        if event.number <= self._iteration:
            raise ControlError(
                f"iteration {event.number} ended after iteration {self._iteration}: report iterations in "
                "ascending order"
            )
        self._iteration, self._ms = event.number, event.ms
        known = self._monitor.late
        news = self._monitor.end_iteration(event.number)
        if self.job.is_starting(event.number):
            return None
        self._age += 1
        self.changes += [(event.number, change) for change in news]
        step = self._timed(event.ms)
        is_clean = self.waiting is None and not self._is_first
        if is_clean:
            self._steps.add(step)
        else:
            self._preparing.append(step)
        late = self._monitor.late
        new = {key for key, delay in late.items() if delay > LATER * known.get(key, 0.0)}
        if new or not known.keys() <= late.keys():
            self._shortfalls = {}
        self._note(news, new)
        if is_clean and self._trial is not None:
            self._try(self._trial, step)
        if self._is_first and self.waiting is None:
            self._is_first = False
            self._charge(self._trial)
        self._report_unknown()
        returns = bool(self.now.delegated) and event.number - self._delegated_at == self._hold
        ages = _AGES if self._monitor.late else _AGES[:3]
        self._due = self._due or bool(news) or self._age in ages or returns
        before = self._rate
        if self.waiting is not None or self._is_on_trial:
            self._lose(before, news)
            return None  # until it is known what the last change brought, nothing else is changed
        if self._failure is not None:
            return None if self._is_left_in_peace else self._take_back(self._failure)
        doubt = None if self.now.delegated else self._question.too_early(self._steps, event.number)
        if self._due and doubt is None:
            self._look()
        self._lose(before, news)
        decision = None
        if doubt is not None:  # candidates are simulated once steps are slower
            self._explain(*doubt)
        elif not self._is_left_in_peace:
            decision = self._decide(news)
        return decision if decision is not None or self._nodes is None else self._move_if_free(self._nodes)

    def _note(self, news: Sequence[LinkChange | ComputeChange], new: Collection[Link]) -> None:
        """Asks whether steps are slower where something `new` turned late, or much later, until nothing is late."""
        self._age = 0 if news else self._age
        if new:
            self._steps.open(max((change.num_iterations for change in news), default=BURST))
            self._told_level = 0.0
            if self._trial is not None and any(a != b for a, b in new):
                self._trial.links_changed = True
        self._close()

    def _close(self) -> None:
        if not self._monitor.late and (self._nodes is None or not self._nodes.excess):
            self._steps.close()

    def _lose(self, before: float, news: Sequence[LinkChange | ComputeChange]) -> None:
        """Adds the loss of this iteration: by how much the best candidate would have been shorter. What is late began
        some steps before candidates were simulated, so the loss of these steps is added with it.
        """
        began = max((change.num_iterations for change in news), default=1)
        if not before and self._steps.is_open:
            began = self._steps.num_open
        self.lost += self._rate + (began - 1) * max(0.0, self._rate - before)

    def _timed(self, ms: float) -> TimedStep:
        """The step that has just ended, with the links and op times that it had, so that it can be simulated."""
        step, reported = self._monitor.latest(ms), self._monitor.reported
        ops = [each for each in reported if isinstance(each, events.OpTimes)]
        verified = self._monitor.factors

        def simulated(
            configuration: Configuration,
            sooner: Mapping[Link, float] = NO_LINKS,
            ops_from: OpsFrom = "verified",
            slowed: float = 1.0,
        ) -> float:
            factors = () if ops_from == "job" else verified
            if ops_from == "step" and ops:
                factors = factors_of(ops, self.job.costs, slowed)
            return predict(self._job_as_measured(factors), configuration, [step.links(sooner)])

        return TimedStep(ms, simulated, step, load_of(ops, self.job.costs), bool(reported))

    def _charge(self, trial: Trial | None) -> None:
        """Charges the prepared change with its price as measured: how much longer the steps took in which ranks
        prepared the change than clean steps take.
        """
        steps = self._steps if trial is None else trial.before
        cost = steps.excess(self._preparing)
        self.paid, self._spent = self.paid + cost, self._spent + cost
        if trial is not None:
            trial.paid, trial.preparing = cost, self._preparing[:-1]
        self._preparing = []

    @property
    def _is_on_trial(self) -> bool:
        return self._trial is not None and self._trial.verdict is None

    @property
    def _failure(self) -> Verdict | None:
        """The verdict by which what runs is to be taken back."""
        return None if self._trial is None else self._trial.failure

    @property
    def _is_left_in_peace(self) -> bool:
        """Whether it is too soon after a change that the ranks dropped, even to take another change back."""
        return self._iteration < self._quiet_until

    @property
    def _hold(self) -> int:
        """Iterations for which links stay delegated at least: more with each recent decision."""
        recent = 2 ** self._question.num_recent(self._iteration)
        return min(max(USUAL.fall // 2, recent), MOST_FALL // 2)

    # Switches and trials.

    def _ended(self, number: int) -> Decision:
        """Returns the decision that was waiting, and stops waiting for it."""
        if self.waiting is None or self.waiting.number != number:
            known = "none is" if self.waiting is None else f"{self.waiting.number} is"
            raise ControlError(f"news of decision {number}, but {known} waiting")
        decision, self.waiting = self.waiting, None
        return decision

    def _switch(self, decision: Decision) -> None:
        then, is_move = decision.configuration, decision.configuration.nodes != self.now.nodes
        if set(then.delegated) - set(self.now.delegated):
            self._delegated_at = self._iteration
        if is_move:
            assert self._nodes is not None, "only nodes of a mesh move"
            self._monitor.relocate(self._nodes.relocate(then))
            self._nodes.late_since, self._shortfalls = self._iteration, {}
        else:
            self._monitor.move(set(then.delegated) ^ set(self.now.delegated))
        before, self._steps, self.now = self._steps, Steps(then), then
        self._due, self._is_first, self._switched_at, self._rate = True, True, self._iteration, 0.0
        if decision.action is Action.TAKE_BACK:
            assert self._trial is not None, "only what was tried is taken back"
            self._steps = self._trial.before
            if self._trial.links_changed or not self._steps.is_open:
                self._steps.open(0)
            self._trial = None
            return
        if decision.ms_now is None:  # a dead link forced it: there is nothing to go back to
            self._proven, self._trial = then, None
            return
        self._spent += decision.price
        promised = 0.0 if decision.action is Action.UNDELEGATE else decision.ms_now - decision.ms_then
        # Where nodes moved, links are others: what ran before cannot be simulated with them.
        runs, shortfalls = None if is_move else then, (self._shortfall_of(before.ran), self._shortfall_of(then))
        self._trial = Trial(decision.number, before, promised, self._monitor.late, runs, shortfalls=shortfalls)
        self._fallback, self._tried = self._proven, what_of(decision.action, then)

    def _try(self, trial: Trial, step: TimedStep) -> None:
        """Gives a step to the trial of what runs, and acts on its verdict."""
        verdict = trial.add(self._iteration, step, self._monitor.are_there(trial.cause))
        if verdict is None:
            return
        self._said.append(verdict)
        told = {(obstacle, frozenset(trial.cause)) for obstacle in Obstacle}
        if verdict.kept:  # its cause has been answered
            self._proven = self.now
            self._told |= told
            has_other_dispatch = trial.runs is not None and self.now.dispatch is not self._fallback.dispatch
            if has_other_dispatch and not trial.links_changed:
                self._shortfalls[self.now.dispatch] = trial.shortfall
            return
        self._told -= told
        self._shortfalls.pop(self._fallback.dispatch, None)  # steps are not longer for this dispatch
        self._proven = self._fallback  # a change that had stayed may turn out slower after all
        cause = self._moved_for if self._tried[0] is Action.MOVE else trial.cause
        self._question.failed(trial.number, self._tried, cause, self._iteration)
        if not self._monitor.down <= set(self._proven.delegated):
            self._trial = None  # what ran before cannot run any more

    def _take_back(self, verdict: Verdict) -> Decision:
        """Goes back to what ran before the change that a verdict is about."""
        check(self._proven.schedule)
        return self._propose(Action.TAKE_BACK, self._proven, str(verdict), (verdict.after, verdict.before), 0.0)

    def _propose(
        self,
        action: Action,
        then: Configuration,
        reason: str,
        ms: tuple[float | None, float],
        price: float,
        causes: tuple[str, ...] = (),
        held: tuple[float, ...] | None = None,
    ) -> Decision:
        """The next decision, of which it is waited for that all ranks run it.

        Args:
            ms: the time of an iteration now and then.
            held: the peaks of each rank, where they are known.
        """
        if held is None:
            held = tuple(peaks(then.schedule, self.job.costs))
        self._number += 1
        waits = in_host(then.schedule, self.job.costs)
        made = action, then, reason, *ms, price, causes, held, waits
        self.waiting = Decision(self._number, self._iteration, *made)
        return self.waiting

    # The choice.

    def _forced(self) -> Decision | None:
        """Decides about a dead link at once, since it cannot wait for the end of the iteration."""
        if self.waiting is not None or self._monitor.down <= set(self.now.delegated):
            return None
        self._look()
        return self._decide([])

    def _look(self) -> None:
        """Simulates all candidates under the links as they are now. A dispatch that turned out to be slower than
        simulated, since these links are late, is as much slower in every candidate.
        """
        self._due, self._looked_at = False, self._iteration
        job, measured = self._as_measured()
        self._measured = measured
        may_return = self._iteration - self._delegated_at >= self._hold
        found = candidates(job, self.now, measured, self._offered, may_return)
        scored = (score(job, measured, each) for each in found)
        self._scored = tuple(each.scaled_by(self._shortfall_of(each.configuration)) for each in scored)
        self._rate = choose(self._scored, 0.0, self.job.least_gain)[1] if self._scored else 0.0

    def _shortfall_of(self, configuration: Configuration) -> float:
        """How many times as long as simulated steps take with its dispatch, since these links are late."""
        return self._shortfalls.get(configuration.dispatch, 1.0)

    def _as_measured(self) -> tuple[Job, Measured]:
        measured = self._monitor.measured(self.now, self._ms)
        return self._job_as_measured(measured.factors), measured

    def _job_as_measured(self, factors: Factors) -> Job:
        return replace(self.job, costs=scaled(self.job.costs, factors)) if factors else self.job

    def _decide(self, news: Sequence[LinkChange | ComputeChange]) -> Decision | None:
        if not self._scored or self._measured is None:
            return None
        now, cause, at = self._scored[0], self._monitor.late, self._iteration
        forced = now.action is not Action.KEEP
        allowed = [
            each
            for each in self._scored
            if forced or each is now or not self._question.bars(what_of(each.action, each.configuration), cause, at)
        ]
        # Where links vary, a calm while is no reason to go back: that a delay fell must be verified.
        returning = (bool(news) or len(self._measured.scenarios) == 1) and not self._question.waits(at)
        chosen, _ = choose(allowed, self.lost - self._spent, self.job.least_gain, returning)
        if chosen.action is Action.KEEP:
            self._say_why(allowed)
            return None
        if not forced:
            if chosen.action is not Action.UNDELEGATE:
                doubt = self._question.doubt(self._steps, at, now.ms - chosen.ms, self._simulated_rise())
                if doubt is None and cause and not self._monitor.are_there(cause):
                    return None  # it may just have passed
                if doubt is not None:
                    self._explain(*doubt)
                    return None
            if self._looked_at < at:  # links may have become steady since
                self._look()
                return self._decide(news)
            self._question.decided(at)
        check(chosen.configuration.schedule)
        recent = self._recent()
        causes = tuple(dict.fromkeys(str(change.cause) for change in recent))
        told: Sequence[object] = recent
        if not recent and self._measured.late:  # late from the start on: nothing changed
            told = [causes_in_words({link: self._monitor.level(link) for link in self._measured.late})]
        if (shortfall := self._shortfall_of(self.now)) > 1:
            told = [*told, f"{self.now.dispatch.value} dispatch takes {shortfall:.3g} times as long as simulated"]
        ms = None if forced else now.ms, chosen.ms
        reason = reason_of(told, self.now, chosen.configuration, ms, self._monitor.down)
        return self._propose(chosen.action, chosen.configuration, reason, ms, chosen.price, causes, chosen.peaks)

    def _recent(self) -> list[LinkChange | ComputeChange]:
        """The latest change of everything that is late; of all, where nothing is late any more."""
        found: dict[object, LinkChange | ComputeChange] = {}
        for _, change in self.changes[-32:]:
            key = change.link if isinstance(change, LinkChange) else (change.stage, change.stage)
            found.pop(key, None)
            if not self._monitor.late or undirected(key) in self._monitor.late:
                found[key] = change
        return self._monitor.again(found.values() if self._monitor.late else list(found.values())[-2:])

    def _simulated_rise(self) -> float:
        """How much longer steps are (ms), by simulation, for what is late."""
        found = [
            each.simulated(self.now) - each.simulated(self.now, self._monitor.rises, "job")
            for each in list(self._steps.since)[-BURST:]
            if each.simulated is not None
        ]
        by_nodes = 0.0
        if self._nodes is not None and self._nodes.excess:
            by_nodes = self.predicted_mesh - predict(self.job, self.now, [Links()])
        return max(by_nodes, median(found) if found else 0.0)

    # Nodes of a mesh.

    def _probe(self, event: events.Probed | events.Reranked) -> Decision | None:
        """Takes a round of probes between all nodes, or what a search found for them, and decides where nodes should
        be.
        """
        nodes = self._nodes
        if nodes is None:
            raise ControlError("nodes were probed, and the job has no mesh whose nodes may move")
        if isinstance(event, events.Reranked):
            nodes.take(event)
        elif num := nodes.follow(event, self._iteration, self._switched_at):
            self._steps.open(num)
            nodes.late_since = min(nodes.late_since, self._iteration - self._steps.num_slow_in_a_row)
        self._close()
        return self._move_if_free(nodes)

    def _move_if_free(self, nodes: Orchestrator) -> Decision | None:
        """Decides where nodes should be, unless another change goes on."""
        if not nodes.excess or self.waiting is not None or self._failure is not None or self._is_on_trial:
            return None
        return None if self._is_left_in_peace else self._move(nodes)

    def _move(self, nodes: Orchestrator) -> Decision | None:
        """The placement with the shortest predicted iteration, if it differs from the present one and is
        worth its price.
        """
        nodes.switched(nodes.mesh, self.now)
        found = nodes.answer()
        if found is None:
            return None  # until a search has found where nodes should be
        if found.mesh == nodes.mesh or not nodes.gains(found):
            # What runs where nodes lie is for their messages to say. Of rings, messages say nothing.
            if found.ring_ms >= self.job.least_gain * found.ms_now:
                stay = self.job.nodes_stay or "no other place of the nodes is faster"
                cost = (
                    f"gradient rings over it cost {found.ring_ms:.3g} of {found.ms_now:.4g} ms a step by simulation"
                )
                self._explain_nodes(Obstacle.NODES, f"{stay}; {cost}", nodes, found.ms_now)
            return None
        then = replace(found.configuration, nodes=found.mesh.nodes)
        gain, price = found.ms_now - found.ms_then, self.job.prices.move
        lost = gain * (self._iteration - nodes.late_since)
        if self._question.bars(what_of(Action.MOVE, then), nodes.excess, self._iteration):
            why: tuple[Obstacle, str] | None = (
                Obstacle.TAKEN_BACK,
                "moving nodes was tried, and taken back because steps were not shorter",
            )
        elif lost < price:
            why = Obstacle.PRICE, f"moving nodes takes {price:.3g} ms, and late links have cost {lost:.3g} ms so far"
        else:
            why = self._question.doubt(self._steps, self._iteration, gain, self._simulated_rise())
        if why is not None:
            self._explain_nodes(*why, nodes, found.ms_now)
            return None
        self._question.decided(self._iteration)
        self._moved_for = nodes.excess
        moved = ", ".join(map(str, nodes.mesh.moved(found.mesh)))
        reason = (
            f"{nodes.in_words}; nodes {moved} change places: {found.mesh}; "
            f"by simulation {found.ms_then:.4g} ms a step instead of {found.ms_now:.4g}"
        )
        cause = str(Cause.BANDWIDTH if nodes.slow else Cause.LATENCY)
        return self._propose(Action.MOVE, then, reason, (found.ms_now, found.ms_then), price, (cause,))

    # What is said where nothing is changed.

    def _say_why(self, allowed: Sequence[Candidate]) -> None:
        """Says why what runs stays although there is a cause to change it."""
        now, least_gain = self._scored[0], self.job.least_gain
        best, _ = choose(allowed, float("inf"), least_gain)
        least = min(each.ms for each in self._scored)
        if best is not now:
            cost = f"late links have cost {self.lost:.3g} ms so far, and changes {self._spent:.3g} ms"
            self._explain(Obstacle.PRICE, f"a change takes {best.price:.3g} ms; {cost}, so it is not worth that yet")
        elif len(allowed) < len(self._scored) and least <= now.ms * (1 - least_gain):
            numbers = ", ".join(str(each.number) for each in self._question.taken_back)
            self._explain(
                Obstacle.TAKEN_BACK, f"what would help by simulation was tried and taken back (change {numbers})"
            )
        else:
            caps = ", ".join(f"{cap:.4g}" for cap in self.now.caps)
            why = f"no other plan within the ranks' caps of {caps} activations saves {least_gain:.0%}"
            self._explain(Obstacle.MEMORY, f"{why} (by simulation {now.ms:.4g} ms a step now, {least:.4g} at best)")

    def _explain(self, obstacle: Obstacle, why: str) -> None:
        """Reports once for each cause and obstacle that nothing is changed, and why."""
        cause = self._monitor.late
        final = obstacle in (Obstacle.MEMORY, Obstacle.TAKEN_BACK)
        key = obstacle, frozenset(cause)
        if not cause or key in self._told or obstacle is Obstacle.PAUSE:
            return
        if self._iteration - self._monitor.late_since < (self._steps.burst if final else _SAY):
            return
        self._told.add(key)
        job, measured = self._as_measured()
        helps = what_would_help(job, self.now, measured) if final else ()
        self._say_unanswered(obstacle, why, cause, predict(job, self.now, measured.scenarios), helps)

    def _explain_nodes(self, obstacle: Obstacle, why: str, nodes: Orchestrator, simulated: float) -> None:
        """Reports once for each set of late nodes that they stay, and why, unless waiting may still change that."""
        key = obstacle, frozenset(nodes.excess)
        is_early = len(self._steps.present) < self._steps.fewest
        if is_early or key in self._told or obstacle in (Obstacle.PRICE, Obstacle.PAUSE):
            return
        self._told.add(key)
        self._say_unanswered(obstacle, why, {}, simulated, nodes=nodes.in_words)

    def _report_unknown(self) -> None:
        """Reports, once for each level, that steps are slower and that nothing known explains half of it."""
        steps, calm, level = self._steps, self._steps.calm, self._steps.level
        if self.waiting is not None or self._is_on_trial or calm is None or level is None:
            return
        if len(steps.usual) < steps.fewest or len(steps.since) <= steps.burst:
            return
        rise = steps.rise
        if steps.evidence < UNEXPLAINED or rise < max(SLOWER_STEP * calm, steps.noise):
            return
        by_cause = self._simulated_rise()
        if by_cause < rise / 2 and calm + rise > self._told_level * _AGAIN:
            self._told_level = calm + rise
            why = (
                f"they took {calm:.4g} ms before and take {calm + rise:.4g} ms now ({rise / calm:.0%} more), and "
                f"late links and slow ops explain {max(0.0, by_cause):.3g} of the {rise:.4g} ms"
            )
            words = self._nodes.in_words if self._nodes is not None and self._nodes.excess else ""
            self._say_unanswered(Obstacle.UNKNOWN, why, self._monitor.late, calm + by_cause, nodes=words)
        if not steps.is_open:
            steps.stay_slower()

    def _say_unanswered(
        self,
        obstacle: Obstacle,
        why: str,
        cause: Mapping[Link, float],
        simulated: float,
        helps: tuple[Help, ...] = (),
        nodes: str = "",
    ) -> None:
        before, since = self._steps.calm, self._steps.latest
        late = tuple(sorted(cause.items()))
        times = (self._ms if before is None else before), (self._ms if since is None else since)
        self._said.append(Unanswered(self._iteration, obstacle, why, late, *times, simulated, helps, nodes))
