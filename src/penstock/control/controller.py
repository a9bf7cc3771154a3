"""The controller: events in, decisions out. It knows no clock, thread or socket, so its log replays.

Transfers, OpTimes      measure     each direction of each link, each stage, on its own (link.py, compute.py)
IterationEnded    --->  verify      has a delay changed, or an op's time, and does it last (changes.py)
                                    what is late now, since when (late_causes.py)
                        choose      the best candidate that is worth its price (candidates.py, decide.py)
                        doubt       is what it promises more than a trial could tell from noise (trial.py)
Probed            --->  move        nodes of a mesh to where a late link costs least (orchestrator.py)
Decision          <---  propose     number and digest; all ranks switch or none does
Switched, Dropped --->  from then on that is what runs, or it never was
IterationEnded    --->  try         are steps faster than before (trial.py); if not, what ran before runs again
Unanswered        <---  say so      a link is late and nothing is changed: why, and what would help (advice.py)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median

from penstock.control.advice import Help, Obstacle, Unanswered, what_would_help
from penstock.control.candidate import Action, Candidate, Measured, above, candidates
from penstock.control.changes import Sensitivity
from penstock.control.compute import ComputeChange, Factors, scaled
from penstock.control.configuration import Configuration, Job, fits, in_host, peaks
from penstock.control.decide import Scored, choose, predict, score
from penstock.control.decision import Decision
from penstock.control.errors import ControlError
from penstock.control.events import (
    Dropped,
    Event,
    IterationEnded,
    Link,
    LinkDown,
    LinkUp,
    OpTimes,
    Probed,
    Reranked,
    Switched,
    Transfer,
    Transfers,
    show_link,
    undirected,
)
from penstock.control.late_causes import LateCauses
from penstock.control.link import Cause, LinkChange, LinkEstimate
from penstock.control.log import event_line, header, outcome_line
from penstock.control.measured import JobMonitor
from penstock.control.orchestrator import Orchestrator
from penstock.control.switch_limits import SwitchLimits
from penstock.control.trial import NO_LINKS, ChangeTrial, RevertedChange, StepTimes, TimedStep, Verdict
from penstock.cost import Links
from penstock.schedule import Schedule, check

_AGES = (3, 8, 16, 32, 64)
"""Iterations since the last change after which the choice is made again, since more is known then. After
that, every 64.
"""
_PROBES = 16
"""How many rounds of probes are remembered, each with the iteration after which it came."""
_TELLS = 0.7
"""Deviations of a step by which an offered plan must be shorter."""
_SAY = 3
"""Iterations after which a cause that nothing answers is reported; twice as many if links keep changing."""


class Controller:
    """Decides what a job runs. The same events give the same decisions.

    After a decision it waits for `Switched` or `Dropped` before it makes another. After `Dropped` it decides nothing
        for some iterations, unless a link dies.

    Args:
        job: what runs at the start, its costs, and what may change.
        sensitivity: how large a change must be and how long it must last; the defaults where not given.
        log: called with each line of the log, which `replay` reads; no log where not given.

    Attributes:
        job: as given.
        sensitivity: as given.
        now: the configuration that runs.
        lost: ms lost so far because the best candidate did not run.
        paid: ms that switches have cost so far. It is never more than was lost, unless a dead link forced a switch.
        changes: verified changes of links and stages, each with the iteration in which it was verified.
        verdicts: what measured steps said of decisions.
        unanswered: causes for which nothing was changed, and why.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> controller = ps.control.Controller(job)
        >>> controller.feed(ps.control.IterationEnded(0, 200.0)), controller.now == start
        ((), True)
    """

    def __init__(
        self, job: Job, sensitivity: Sensitivity | None = None, log: Callable[[str], object] | None = None
    ) -> None:
        self.job = job
        self.sensitivity = sensitivity or Sensitivity()
        self.now = job.start
        self.lost = self.paid = 0.0
        self.changes: list[tuple[int, LinkChange | ComputeChange]] = []
        self._log = log
        self._monitor = JobMonitor(job, self.sensitivity)
        self._offered: tuple[Schedule, ...] = ()
        self._iteration, self._ms = -1, 0.0
        self._age = 0
        self._due = False
        self._scored: tuple[Scored, ...] = ()
        self._rate = 0.0
        self._waiting: Decision | None = None
        self._number = 0
        self._switch_limits = SwitchLimits()
        self._hold = self.sensitivity.fall // 2
        self._delegated_at = self._returned_at = self._quiet_until = -(10**9)
        self.verdicts: list[Verdict] = []
        self.unanswered: list[Unanswered] = []
        self._steps = StepTimes(job.start)
        self._proven = self._fallback = job.start
        self._trial: ChangeTrial | None = None
        self._revert: Verdict | None = None
        self._causes = LateCauses(self._monitor, self.sensitivity.fall)
        self._taken_back: list[RevertedChange] = []
        self._tried: tuple[Action, object] = Action.KEEP, ()
        self._measured: Measured | None = None
        self._said: list[Verdict | Unanswered] = []
        self._nodes = None if job.mesh is None else Orchestrator(job, job.mesh)
        self._probed: deque[int] = deque(maxlen=_PROBES)
        self._late_since, self._switched_at = 0, -1
        self._told_of_nodes: Mapping[Link, float] = {}
        self._moved_for: Mapping[Link, float] = {}
        if log is not None:
            log(header(job, self.sensitivity))

    @property
    def waiting(self) -> Decision | None:
        """The decision of which it is not yet known whether all ranks run it."""
        return self._waiting

    @property
    def links(self) -> Mapping[Link, LinkEstimate]:
        """What is known of each direction of each link since its last verified change."""
        return self._monitor.estimates

    @property
    def predicted_mesh(self) -> float:
        """The predicted time of an iteration over the mesh (ms), with its rings, with the links as probed; 0
        without a mesh.
        """
        return 0.0 if self._nodes is None else self._nodes.iteration(self.now)

    def plan_problem(self) -> tuple[Job, Links] | None:
        """What a better plan is to be searched for: the job with costs as measured, and the delays that matter. None
        where orders may not change, nothing is late or slow, or what is has just changed.
        """
        job, measured = self._as_measured()
        if not self.job.may_replan or not (measured.late or measured.factors) or self._age < _SAY:
            return None
        return job, above(measured.typical, job.smallest_delay)

    def would_gain(self, schedule: Schedule) -> bool:
        """Whether steps would be shorter with a schedule, by more than a trial could take for noise."""
        job, measured = self._as_measured()
        ways = [replace(self.now, schedule=schedule, dispatch=each) for each in job.dispatches]
        now, *then = (predict(job, e, measured.scenarios) for e in (self.now, *ways) if fits(e, job.costs))
        return bool(then) and now - min(then) >= max(job.least_gain * now, _TELLS * self._steps.noise)

    @property
    def search(self) -> Callable[[], Reranked] | None:
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
        for said in self._said:
            if isinstance(said, Verdict):
                self.verdicts.append(said)
            else:
                self.unanswered.append(said)
        if self._log is not None:
            self._log(event_line(event))
            for outcome in (*self._said, *filter(None, [decision])):
                self._log(outcome_line(outcome))
        return () if decision is None else (decision,)

    def _take(self, event: Event) -> Decision | None:
        if isinstance(event, Transfer | Transfers | OpTimes):
            self._monitor.feed(event)
            return None
        if isinstance(event, IterationEnded):
            return self._end_iteration(event)
        elif isinstance(event, LinkDown):
            self._monitor.check_link(event.link)
            self._monitor.down.add(undirected(event.link))
            self._due = True
        elif isinstance(event, LinkUp):
            self._monitor.check_link(event.link)
            self._monitor.down.discard(undirected(event.link))
            # What comes back may go again: it is left in peace for a while.
            self._delegated_at = self._iteration
        elif isinstance(event, Probed | Reranked):
            return self._probe(event)
        elif isinstance(event, Switched):
            self._switch(self._ended(event.number))
        elif isinstance(event, Dropped):
            self._ended(event.number)
            self._quiet_until = self._iteration + self.sensitivity.fall // 2
            self._due = True
        else:
            check(event.schedule)
            self._offered = (*self._offered, event.schedule)
            self._due = True
        return self._forced()

    def _ended(self, number: int) -> Decision:
        """Returns the decision that was waiting, and stops waiting for it."""
        if self._waiting is None or self._waiting.number != number:
            known = "none is" if self._waiting is None else f"{self._waiting.number} is"
            raise ControlError(f"news of decision {number}, but {known} waiting")
        decision, self._waiting = self._waiting, None
        return decision

    def _switch(self, decision: Decision) -> None:
        moved = set(decision.configuration.delegated) ^ set(self.now.delegated)
        if set(decision.configuration.delegated) - set(self.now.delegated):
            if self._iteration - self._returned_at <= 4 * self._hold:
                self._hold = min(2 * self._hold, self.sensitivity.most_fall // 2)
            else:
                self._hold = self.sensitivity.fall // 2
            self._delegated_at = self._iteration
        elif moved:
            self._returned_at = self._iteration
        if decision.configuration.nodes != self.now.nodes:
            self._relocate(decision.configuration)
        else:
            self._monitor.move(moved, self.now.delegated)
        self.now = decision.configuration
        self.paid += decision.price if decision.ms_now is not None else 0.0
        self._due, self._switched_at = True, self._iteration
        self._rate = 0.0
        if decision.action is Action.TAKE_BACK:
            assert self._trial is not None, "only what was tried is taken back"
            self._steps = self._trial.before
            if self._trial.void:
                self._steps.resume()
            self._trial = self._revert = None
            self._told_of_nodes = {}
            return
        self._revert = None
        if decision.ms_now is None:  # a dead link forced it: there is nothing to go back to
            self._proven, self._trial = self.now, None
        else:
            promised = decision.ms_now - decision.ms_then if decision.action is not Action.UNDELEGATE else 0.0
            # Where nodes moved, links are others: what ran before cannot be simulated with them.
            runs = self.now if decision.action is not Action.MOVE else None
            self._trial = ChangeTrial(decision.number, self._steps, promised, self._causes.ms, runs)
            self._fallback = self._proven
            self._tried = _what(decision.action, decision.configuration)
        self._steps = StepTimes(self.now)

    def _end_iteration(self, event: IterationEnded) -> Decision | None:
        if event.number <= self._iteration:
            raise ControlError(
                f"iteration {event.number} ended after iteration {self._iteration}: report iterations in "
                "ascending order"
            )
        self._iteration, self._ms = event.number, event.ms
        self._age += 1
        news = self._monitor.end_iteration(event.ms)
        self.changes += [(event.number, change) for change in news]
        step = self._timed(event.ms)
        self._steps.add(step)
        if news:
            self._age = 0
            rose = any(change.change.rose for change in news)
            self._steps.changed(max(change.num_iterations for change in news), rose)
            new = self._causes.note(event.number, news)
            if self._trial is not None and self._trial.is_open and any(a != b for a, b in new):
                self._trial.void = True
        self._causes.forget(event.number)
        self._try(event.number, step)
        back = bool(self.now.delegated) and event.number - self._delegated_at == self._hold
        self._due = self._due or bool(news) or self._is_age_to_look() or back
        if self._revert is not None and self._waiting is None:
            return None if self._is_left_in_peace(event.number) else self._take_back(self._revert)
        if self._trial is not None and self._trial.is_open and not self._trial.void:
            return None  # until it is known what the last change brought, nothing else is changed
        before, began = self._rate, max((change.num_iterations for change in news), default=1)
        if self._due and self._waiting is None:
            self._look()
        # A change began some iterations ago, and has cost since then.
        self.lost += self._rate + (began - 1) * max(0.0, self._rate - before)
        if self._waiting is not None:
            return None
        return None if self._is_left_in_peace(event.number) else self._decide(news)

    def _is_left_in_peace(self, iteration: int) -> bool:
        """Whether it is too soon after a change that the ranks dropped, even if it was to take another change
        back.
        """
        if iteration >= self._quiet_until:
            return False
        self._explain(Obstacle.PAUSE, "the ranks could not all take the last change, and are left in peace")
        return True

    # Nodes of a mesh.

    def _probe(self, event: Probed | Reranked) -> Decision | None:
        """Takes a round of probes between all nodes, or what a search found for them, and decides where nodes should
        be.
        """
        nodes = self._nodes
        if nodes is None:
            raise ControlError("nodes were probed, and the job has no mesh whose nodes may move")
        if isinstance(event, Reranked):
            nodes.take(event)
        else:
            self._probed.append(self._iteration)
            if nodes.verifies(dict(event.times)):
                self._note_change(nodes)
        if not nodes.excess or self._waiting is not None or self._revert is not None:
            return None
        return None if self._iteration < self._quiet_until else self._move(nodes)

    def _note_change(self, nodes: Orchestrator) -> None:
        """Notes since when links between nodes are as late as they are."""
        self._late_since = 0
        if nodes.news:  # what was late all the time that this runs has no steps without it to be held against
            num = max(change.began for change in nodes.news)
            self._late_since = self._probed[-min(len(self._probed), num)]
            if len(self._probed) > num and self._probed[-num - 1] > self._switched_at:
                rose = any(change.rose for change in nodes.news)
                self._steps.changed(self._iteration - self._late_since, rose)

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
                cost = f"rings on it cost {found.ring_ms:.3g} of {found.ms_now:.4g} ms a step by simulation"
                self._explain_nodes(Obstacle.NODES, f"{stay}; {cost}", nodes, found.ms_now)
            return None
        configuration = replace(found.configuration, nodes=found.mesh.nodes)
        gain, price = found.ms_now - found.ms_then, self.job.prices.move
        lost = gain * (self._iteration - self._late_since)
        needed = self.job.least_gain * self._switch_limits.times_gain(self._iteration, True) * found.ms_now
        what = _what(Action.MOVE, configuration)
        if any(each.bars(what, nodes.excess) for each in self._taken_back):
            why: tuple[Obstacle, str] | None = Obstacle.TAKEN_BACK, "moving nodes was tried and taken back"
        elif self._switch_limits.waits(self._iteration, self._steps.are_clearly_slower):
            why = Obstacle.PAUSE, "what runs was changed a short time ago, and is left in peace"
        elif lost < price:
            why = Obstacle.PRICE, f"moving costs {price:.3g} ms, and late links have cost {lost:.3g} ms so far"
        elif gain < needed:
            why = Obstacle.NOISE, f"moving promises {gain:.3g} of {found.ms_now:.4g} ms a step, not {needed:.3g}"
        else:
            why = self._doubt(gain)
        if why is not None:
            self._explain_nodes(*why, nodes, found.ms_now)
            return None
        self._switch_limits.decided(self._iteration)
        moved = ", ".join(map(str, nodes.mesh.moved(found.mesh)))
        self._moved_for, self._told_of_nodes = nodes.excess, nodes.excess
        return self._propose(
            Action.MOVE,
            configuration,
            f"{nodes.in_words}; nodes {moved} change places: {found.mesh}; "
            f"simulated {found.ms_then:.4g} ms an iteration instead of {found.ms_now:.4g}",
            found.ms_now,
            found.ms_then,
            price,
            (str(Cause.BANDWIDTH if nodes.slow else Cause.LATENCY),),
        )

    def _explain_nodes(self, obstacle: Obstacle, why: str, nodes: Orchestrator, simulated: float) -> None:
        """Reports once for each set of late nodes that they stay, and why, unless waiting may still change that."""
        if obstacle in (Obstacle.PRICE, Obstacle.PAUSE) or not self._steps.are_enough:
            return
        if self._told_of_nodes.keys() == nodes.excess.keys():
            return
        self._told_of_nodes = nodes.excess
        self._say_unanswered(obstacle, why, (), simulated, nodes=nodes.in_words)

    def _relocate(self, then: Configuration) -> None:
        """Nodes change places from the next iteration on. Links then join other nodes, and are as late as
        these were probed.
        """
        assert self._nodes is not None, "only nodes of a mesh move"
        mesh = replace(self._nodes.mesh, nodes=then.nodes)
        self._nodes.switched(mesh, then)
        late: dict[Link, float] = {}
        for replica in range(mesh.dp):
            own = mesh.pipeline(replica)
            for a, b in combinations(range(mesh.pp), 2):
                ms = self._nodes.late.get(undirected((own[a], own[b])), 0.0)
                late[a, b] = max(late.get((a, b), 0.0), ms)
        self._monitor.relocate(late)
        self._causes.forget_links()

    def _try(self, iteration: int, step: TimedStep) -> None:
        """Gives the step to the trial of what runs, and acts on its verdict."""
        trial = self._trial
        if trial is None or self._revert is not None:
            return
        verdict = trial.add(iteration, step, self._causes.are_there(trial.cause))
        if verdict is None:
            return
        self._said.append(verdict)
        if verdict.kept:
            self._proven = self.now
            self._causes.answered = True
            return
        self._causes.answered = False
        self._proven = self._fallback  # a change that had stayed may turn out slower after all
        self._switch_limits.failed(iteration)
        cause = self._moved_for if self._tried[0] is Action.MOVE else trial.cause
        self._taken_back.append(RevertedChange(trial.number, self._tried, cause))
        if self._monitor.down <= set(self._proven.delegated):
            self._revert = verdict
        else:  # what ran before cannot run any more
            self._trial = None

    def _take_back(self, verdict: Verdict) -> Decision:
        """Goes back to what ran before the change that a verdict is about."""
        check(self._proven.schedule)
        return self._propose(Action.TAKE_BACK, self._proven, str(verdict), verdict.after, verdict.before, 0.0)

    def _propose(
        self,
        action: Action,
        configuration: Configuration,
        reason: str,
        ms_now: float | None,
        ms_then: float,
        price: float,
        causes: tuple[str, ...] = (),
        held: tuple[float, ...] | None = None,
    ) -> Decision:
        """The next decision, of which it is waited for that all ranks run it.

        Args:
            held: the peaks of each rank, where they are known.
        """
        if held is None:
            held = tuple(peaks(configuration.schedule, self.job.costs))
        self._number += 1
        moved = in_host(configuration.schedule, self.job.costs)
        made = action, configuration, reason, ms_now, ms_then, price, causes, held, moved
        self._waiting = Decision(self._number, self._iteration, *made)
        return self._waiting

    def _is_age_to_look(self) -> bool:
        return self._age in _AGES or (self._age > 0 and self._age % _AGES[-1] == 0)

    def _forced(self) -> Decision | None:
        """Decides about a dead link at once, since it cannot wait for the end of the iteration."""
        if self._waiting is not None or self._monitor.down <= set(self.now.delegated):
            return None
        self._look()
        return self._decide([])

    def _look(self) -> None:
        """Simulates all candidates under the links as they are now."""
        self._due = False
        job, measured = self._as_measured()
        self._measured = measured
        found = candidates(job, self.now, measured, self._offered, self._may_return())
        self._scored = tuple(score(job, measured, each) for each in found)
        self._rate = choose(self._scored, 0.0, self.job.least_gain)[1] if self._scored else 0.0

    def _timed(self, ms: float) -> TimedStep:
        """The step that has just ended, with the links and op times that it had, so that it can be simulated."""
        step, factors = self._monitor.latest(self.now.delegated, ms), self._monitor.factors

        def simulated(
            configuration: Configuration, late: bool = True, sooner: Mapping[Link, float] = NO_LINKS
        ) -> float:
            job = self._job_as_measured(factors)
            return predict(job, configuration, [step.links(sooner) if late else Links()])

        return TimedStep(ms, simulated, step)

    def _as_measured(self) -> tuple[Job, Measured]:
        measured = self._monitor.measured(self.now.delegated, self._ms)
        return self._job_as_measured(measured.factors), measured

    def _job_as_measured(self, factors: Factors) -> Job:
        return replace(self.job, costs=scaled(self.job.costs, factors)) if factors else self.job

    def _may_return(self) -> bool:
        return self._iteration - self._delegated_at >= self._hold

    def _decide(self, news: Sequence[LinkChange | ComputeChange]) -> Decision | None:
        if not self._scored:
            return None
        forced = self._scored[0].candidate.action is not Action.KEEP
        if not forced and self._switch_limits.waits(self._iteration, self._steps.are_clearly_slower):
            self._explain(Obstacle.PAUSE, "what runs was changed a short time ago, and is left in peace")
            return None
        gain = self.job.least_gain * self._switch_limits.times_gain(self._iteration, bool(news))
        # Where links vary, a calm while is no reason to go back: that a delay fell must be verified.
        returning = self._may_return() and (bool(news) or self._scored[0].worst is None)
        wary = self._switch_limits.is_wary(self._iteration)
        allowed = [each for each in self._scored if forced or not self._is_barred(each.candidate)]
        chosen, _ = choose(allowed, self.lost - self.paid, gain, returning=returning, wary=wary)
        if chosen.candidate.action is Action.KEEP:
            self._say_why(allowed, gain, returning, wary)
            return None
        now = None if forced else self._scored[0]
        if now is not None and chosen.candidate.action is not Action.UNDELEGATE:
            doubt = self._doubt(now.ms - chosen.ms, chosen.candidate)
            if doubt is not None:
                self._explain(*doubt)
                return None
        check(chosen.candidate.configuration.schedule)
        if not forced:
            self._switch_limits.decided(self._iteration)
        recent = list(news) or [self._monitor.again(change) for _, change in self.changes[-1:]]
        self._causes.answered = True
        return self._propose(
            chosen.candidate.action,
            chosen.candidate.configuration,
            self._reason(recent, None if now is None else now.ms, chosen.ms),
            None if now is None else now.ms,
            chosen.ms,
            chosen.candidate.price,
            tuple(dict.fromkeys(str(change.cause) for change in recent)),
            chosen.peaks,
        )

    def _is_barred(self, candidate: Candidate) -> bool:
        """Whether it was tried for the present cause before, and taken back."""
        what = _what(candidate.action, candidate.configuration)
        cause = self._causes.ms
        return candidate.action is not Action.KEEP and any(each.bars(what, cause) for each in self._taken_back)

    def _doubt(self, gain: float, candidate: Candidate | None = None) -> tuple[Obstacle, str] | None:
        """Why a simulated gain (ms) is not worth a trial: measured steps could not show it, neither directly nor each
        compared with its own links.

        Args:
            candidate: what promises it; None where nodes are to move.
        """
        doubt = self._steps.doubt(gain, self.job.least_gain)
        if doubt is None or (candidate is not None and self._gains_anyway(candidate)):
            return None
        return None if self._steps.would_tell(gain) else doubt

    def _gains_anyway(self, candidate: Candidate) -> bool:
        """Whether a change gains enough by simulation also with links as they were before some became late.

        What was late all the time is in the steps before and since, which then do not differ by it. Where a change
        was taken back, links have turned out to tell less than they seem to, and steps must tell as well.
        """
        causes, steps = self._causes.ms, self._steps
        simulated = [step.simulated for step in steps.present if step.simulated is not None]
        is_of_links = bool(causes) and all(a != b for a, b in causes)
        if not is_of_links or not simulated or self._taken_back:
            return False
        gains = [each(self.now, True, causes) - each(candidate.configuration, True, causes) for each in simulated]
        return steps.are_enough and median(gains) >= steps.least_told(self.job.least_gain)

    def _say_why(self, allowed: Sequence[Scored], gain: float, returning: bool, wary: bool) -> None:
        """Says why what runs stays although there is a cause to change it."""
        if not self._is_time_to_say():
            return
        now = self._scored[0]
        best, _ = choose(allowed, float("inf"), gain, returning=returning, wary=wary)
        if best is not now:
            self._explain(
                Obstacle.PRICE,
                f"switching costs {best.candidate.price:.3g} ms, and late links have cost "
                f"{max(0.0, self.lost - self.paid):.3g} ms so far",
            )
            return
        least = min(each.ms for each in self._scored)
        if len(allowed) < len(self._scored) and least <= now.ms * (1 - gain):
            numbers = ", ".join(str(each.number) for each in self._taken_back)
            self._explain(Obstacle.TAKEN_BACK, f"what would help by simulation was tried and taken back ({numbers})")
            return
        self._explain(
            Obstacle.MEMORY,
            f"no order, dispatch or delegate within the caps of {', '.join(f'{cap:.4g}' for cap in self.now.caps)} "
            f"activations saves {gain:.0%} (simulated {now.ms:.4g} ms a step, at best {least:.4g})",
        )

    def _is_time_to_say(self) -> bool:
        since = self._iteration - self._causes.since
        return bool(self._causes.ms) and not self._causes.answered and (self._age >= _SAY or since >= 2 * _SAY)

    def _explain(self, obstacle: Obstacle, why: str) -> None:
        """Reports once for each cause that nothing is changed for it, and why."""
        if not self._is_time_to_say() or self._measured is None or not self._scored:
            return
        if obstacle is Obstacle.PAUSE and self._iteration - self._causes.since < 2 * _SAY:
            return
        self._causes.answered = True
        measured = self._measured
        helps: tuple[Help, ...] = ()
        if obstacle in (Obstacle.MEMORY, Obstacle.TAKEN_BACK):
            helps = what_would_help(self._job_as_measured(measured.factors), self.now, measured)
        cause = tuple(sorted(self._causes.ms.items()))
        self._say_unanswered(obstacle, why, cause, self._scored[0].ms, helps)

    def _say_unanswered(
        self,
        obstacle: Obstacle,
        why: str,
        cause: tuple[tuple[Link, float], ...],
        simulated: float,
        helps: tuple[Help, ...] = (),
        nodes: str = "",
    ) -> None:
        steps = self._steps
        calm = median(steps.calm) if steps.calm else self._ms
        now = median(steps.now) if steps.now else self._ms
        self._said.append(Unanswered(self._iteration, obstacle, why, cause, calm, now, simulated, helps, nodes))

    def _reason(self, news: Sequence[LinkChange | ComputeChange], now: float | None, then: float) -> str:
        parts = []
        if now is None:
            parts.append("link " + ", ".join(show_link(link) for link in sorted(self._monitor.down)) + " is down")
        parts += map(str, news)
        times = f"{then:.4g} ms an iteration" + ("" if now is None else f" instead of {now:.4g}")
        return "; ".join([*parts, f"simulated {times}"])


def _what(action: Action, then: Configuration) -> tuple[Action, object]:
    """What identifies a change, so that it is not tried again for the same cause."""
    return action, then.nodes if action is Action.MOVE else then.delegated
