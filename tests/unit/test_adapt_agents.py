"""Several agents over one store, as in several processes. Iterations are simulated: nothing depends on the clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock as ps
from penstock.control import Configuration, Dropped, Event, LinkDown, Switched, Unanswered, replay
from penstock.control.advice import Obstacle
from penstock.control.configuration import peaks
from penstock.control.events import event_from_json
from penstock.control.log import outcome_line
from penstock.report.from_logs import read_story
from penstock.report.run_story import RunStory
from penstock.runtime import RuntimeFailure
from penstock.runtime.adapt import Agent, MeasuredStep, agent
from penstock.runtime.adapt.coordinator import STARTING_STEPS, RunSetting
from penstock.runtime.adapt.store import Rendezvous, Store, StoreLost, TorchStore
from penstock.runtime.mesh.peers import LocalPeers, Peers
from penstock.runtime.transport.base import TransferRecord
from penstock.runtime.transport.choose import TransportChoice
from waiting import PATIENCE

pytestmark = pytest.mark.unit

NUM_RANKS = 4
COSTS = ps.Costs.uniform(NUM_RANKS, f=10, i=10, w=10)
ZB = ps.build("zb", NUM_RANKS, 8)
START = Configuration(ZB, "frozen", (), tuple(peaks(ZB, COSTS)))  # type: ignore[arg-type]
HEALTHY, LATE = ps.Links(), ps.Links({(2, 3): 60.0, (3, 2): 60.0})
BOUNDED = ps.TransportOptions("direct", links=ps.Links())
SETTING = RunSetting(START, COSTS, TransportChoice(BOUNDED, may_delegate=True))
TRAINS = replace(SETTING, costs=None, num_starting=STARTING_STEPS)
"""As where a model trains: costs are measured first, and the starting steps are no evidence."""
DEADLINE = PATIENCE

Ready = Callable[[Configuration], Any]


class Group:
    """Agents of four processes, and what each of them runs."""

    def __init__(
        self, folder: Path, stores: Sequence[Store], readies: Sequence[Ready], setting: RunSetting, **options: Any
    ) -> None:
        self.folder = folder
        self.running = [START] * NUM_RANKS
        self.numbers: list[int] = []
        adapt = ps.AdaptOptions(folder=folder, **options)
        self.agents = [
            Agent(
                adapt,
                setting,
                Rendezvous(stores[rank], "test", rank, range(NUM_RANKS), (0,) * NUM_RANKS),
                readies[rank],
            )
            for rank in range(NUM_RANKS)
        ]

    def step(self, links: ps.Links, heard: bool = True, news: Sequence[Event] = ()) -> None:
        """One iteration on these links, with this news; then waits until the controller has heard of it."""
        assert len({each.digest for each in self.running}) == 1, "all ranks run the same"
        now = self.running[0]
        timeline = ps.simulate(
            now.schedule,
            COSTS,
            links=links,
            dispatch=now.dispatch,
            transport=ps.Blocking(2, frozenset(now.delegated)),
            memory_limit=now.caps if now.dispatch == "dynamic" else None,
        )
        number = len(self.numbers)
        begin = number * 10**10
        measured = []
        for rank in range(len(self.agents)):
            ops = [(t.op, begin + round(t.start * 1e6), begin + round(t.end * 1e6)) for t in timeline.rows[rank]]
            crossings = [
                TransferRecord(
                    m.source_rank, rank, 0, sent, sent, sent + round(links.delay(m.source_rank, rank) * 1e6)
                )
                for m in timeline.messages
                if m.target_rank == rank
                for sent in [begin + round(m.sent * 1e6)]
            ]
            end = begin + round(timeline.makespan * 1e6)
            measured.append([MeasuredStep(rank, begin, end, ops, crossings, news)])
        self.numbers.append(self.agents[0].number)
        self.settle(measured)
        if heard:
            self.wait_for(lambda: any(each["iteration"] == number for each in self.records()))
            self.settle()

    def settle(self, measured: Sequence[Sequence[MeasuredStep]] | None = None) -> None:
        """All ranks vote, after a step or once more after it."""
        votes = [one.vote(each) for one, each in zip(self.agents, measured or [()] * len(self.agents), strict=True)]
        found = [one.count_votes(votes) for one in self.agents]
        assert len({None if each is None else each.number for each in found}) == 1
        for rank, each in enumerate(found):
            if each is not None:
                assert each.made == (rank, each.configuration.digest)
                self.running[rank] = each.configuration

    def until(self, links: ps.Links, what: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not what():
            assert time.monotonic() < end, f"not within {len(self.numbers)} iterations: {self.log()[-1][:300]}"
            self.step(links)
            time.sleep(0.02)

    def wait_for(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not what():
            assert time.monotonic() < end
            time.sleep(0.005)

    def log(self) -> list[str]:
        return self.whole_lines("control.jsonl")

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.whole_lines("iterations.jsonl")]

    def whole_lines(self, name: str) -> list[str]:
        """Of a file to which another thread writes."""
        text = (self.folder / name).read_text()
        return text[: text.rfind("\n") + 1].splitlines()

    def story(self) -> RunStory:
        return read_story(self.log(), name="run", iterations=self.whole_lines("iterations.jsonl"))

    def news(self, kind: type[Any]) -> list[int]:
        events = [json.loads(line).get("event") for line in self.log()]
        found = [event_from_json(event) for event in events if event is not None]
        return [event.number for event in found if isinstance(event, kind)]


def ready_of(rank: int) -> Ready:
    return lambda configuration: (rank, configuration.digest)


@contextmanager
def group(
    folder: Path,
    stores: Sequence[Store] | None = None,
    readies: Sequence[Ready] | None = None,
    setting: RunSetting = SETTING,
    **options: Any,
) -> Iterator[Group]:
    memory = TorchStore(dist.HashStore())
    made = Group(
        folder,
        stores or [memory] * NUM_RANKS,
        readies or [ready_of(rank) for rank in range(NUM_RANKS)],
        setting,
        **options,
    )
    try:
        yield made
    finally:
        for one in reversed(made.agents):
            one.close()


@pytest.mark.slow
def test_a_late_link_is_answered_and_the_log_says_it_all(tmp_path: Path) -> None:
    with group(tmp_path) as ranks:
        for _ in range(10):
            ranks.step(HEALTHY)
        assert set(ranks.numbers) == {0}, "nothing is decided without a reason"
        ranks.until(LATE, lambda: ranks.agents[0].number == 1)
        for _ in range(5):
            ranks.step(LATE)
        decisions = replay(ranks.log())
        assert decisions[0].iteration == 13, "three late iterations may be a burst"
        assert [one.digest for one in ranks.agents] == [ranks.running[0].digest] * NUM_RANKS
        applied = ranks.news(Switched)
        assert applied[0] == 1
        digests = {d.number: d.configuration.digest for d in decisions}
        assert ranks.running[0].digest == digests[ranks.agents[0].number]
        assert [r["number"] for r in ranks.records()] == ranks.numbers
        assert [r["iteration"] for r in ranks.records()] == list(range(len(ranks.numbers)))
        told = [json.loads(line) for line in (tmp_path / "timelines.jsonl").read_text().splitlines()]
        assert [(each["why"], each["number"]) for each in told][:3] == [("start", 0), ("before 1", 0), ("after 1", 1)]
        assert all(len(each["ops"]) == ZB.num_ops for each in told)
    assert all(one.notices == [] for one in ranks.agents)


@pytest.mark.parametrize("died", [1, 6])
def test_regression_a_link_that_died_in_the_first_steps_was_forgotten_or_dated_wrongly(
    tmp_path: Path, died: int
) -> None:
    """News was lost in the two iterations that come before costs are measured. A link that died after these, in the
    starting steps, had gone down in iteration 0 by the report.
    """
    with group(tmp_path, setting=TRAINS) as ranks:
        for step in range(died + 1):
            ranks.step(HEALTHY, news=[LinkDown((0, 1))] if step == died else ())
        ranks.until(HEALTHY, lambda: ranks.agents[0].number == 1)
        assert ranks.running[0].delegated == ((0, 1),)
        story = ranks.story()
        assert {(fault.iteration, fault.what) for fault in story.faults} == {(died, "link 0–1 went down")}
        assert replay(ranks.log())


def test_regression_the_report_counted_starting_steps_as_usual(tmp_path: Path) -> None:
    """The controller left out eight steps, the report two: what an undisturbed step takes came from the others."""
    with group(tmp_path, setting=TRAINS) as ranks:
        for step in range(2 * STARTING_STEPS):
            ranks.step(LATE if step < STARTING_STEPS else HEALTHY)
        story = ranks.story()
        assert [each.number for each in story.iterations] == list(range(2 * STARTING_STEPS))
        assert [each.is_clean for each in story.iterations] == [False] * STARTING_STEPS + [True] * STARTING_STEPS


@pytest.mark.slow
def test_a_plan_that_one_rank_cannot_run_is_dropped_everywhere(tmp_path: Path) -> None:
    tried: list[str] = []

    def refuse(configuration: Configuration) -> Any:
        tried.append(configuration.digest)
        raise RuntimeFailure("no room here")

    with group(tmp_path, readies=[ready_of(0), ready_of(1), refuse, ready_of(3)]) as ranks:
        for _ in range(8):
            ranks.step(HEALTHY)
        ranks.until(LATE, lambda: ranks.news(Dropped) != [])
        assert ranks.news(Dropped)[0] == 1
        assert set(ranks.numbers) == {0}
        assert [each.digest for each in ranks.running] == [START.digest] * NUM_RANKS
        assert "no room here" in ranks.agents[2].notices[0]
        assert ranks.agents[0].notices[0].startswith("change 1 is not made: rank 2 cannot run its plan")
        assert len(replay(ranks.log())) >= 1
        assert len(tried) >= 1


class Forgetful:
    """A store that loses the first plans for some ranks."""

    def __init__(self, store: Store, lose: list[str]) -> None:
        self._store, self._lose = store, lose

    def push(self, queue: str, value: bytes) -> None:
        if queue in self._lose:
            self._lose.remove(queue)
        else:
            self._store.push(queue, value)

    def pop(self, queue: str) -> bytes | None:
        return self._store.pop(queue)

    def close(self) -> None:
        self._store.close()


@pytest.mark.slow
def test_a_plan_that_never_reaches_a_rank_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "GIVE_UP_S", 0.2)
    lose = ["test/plans/3"] * 1000
    with group(tmp_path, stores=[Forgetful(TorchStore(dist.HashStore()), lose)] * NUM_RANKS) as ranks:
        for _ in range(8):
            ranks.step(HEALTHY)
        ranks.until(LATE, lambda: ranks.news(Dropped) != [])
        assert set(ranks.numbers) == {0}
        replay(ranks.log())


class Gone:
    """A store that one rank can reach no more from some moment on."""

    def __init__(self, store: Store) -> None:
        self._store, self.gone = store, False

    def push(self, queue: str, value: bytes) -> None:
        self._check()
        self._store.push(queue, value)

    def pop(self, queue: str) -> bytes | None:
        self._check()
        return self._store.pop(queue)

    def close(self) -> None:
        self._store.close()

    def _check(self) -> None:
        if self.gone:
            raise StoreLost("the cable is out")


@pytest.mark.slow
def test_one_rank_without_the_store_ends_adapting_for_all_and_says_so_once(tmp_path: Path) -> None:
    memory = TorchStore(dist.HashStore())
    gone = Gone(memory)
    with group(tmp_path, stores=[memory, memory, gone, memory], patience=2.0) as ranks:
        for _ in range(3):
            ranks.step(HEALTHY)
        gone.gone = True
        end = time.monotonic() + DEADLINE
        while not ranks.agents[0].notices and time.monotonic() < end:
            ranks.step(HEALTHY, heard=False)
            time.sleep(0.05)
        for _ in range(5):
            ranks.step(HEALTHY, heard=False)
        assert [len(one.notices) for one in ranks.agents] == [1] * NUM_RANKS
        assert "out of reach for more than 2 s: the cable is out" in ranks.agents[2].notices[0]
        assert "and plan 0 stays: rank 2 can no longer adapt" in ranks.agents[0].notices[0]
        assert set(ranks.numbers) == {0}
        assert replay(ranks.log()) == ()


@pytest.mark.slow
def test_regression_clocks_were_compared_by_some_ranks_alone_where_one_adapts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks must compare, or none: the others would wait for those that do not."""
    monkeypatch.setattr(agent, "CLOCK_COMPARISON_ITERATIONS", 3)
    compared = [0] * NUM_RANKS

    def compare(rank: int, peers: Peers) -> Sequence[int]:
        compared[rank] += 1
        return (0,) * NUM_RANKS

    with group(tmp_path) as ranks:
        for rank, one in enumerate(ranks.agents):
            one._rendezvous.compare = partial(compare, rank)
        for number in range(12):
            if number == 5:
                ranks.agents[2]._stop_later("it is told to")
            ranks.step(HEALTHY, heard=False)
            for one in ranks.agents:
                one.look_at_nodes(LocalPeers(NUM_RANKS), number + 1)
            assert len(set(compared)) == 1, number
    assert compared == [1] * NUM_RANKS


def test_regression_notices_of_a_resumed_run_counted_from_its_resumption(tmp_path: Path) -> None:
    said = Unanswered(1, Obstacle.MEMORY, "no room", (((0, 1), 60.0),), 212.0, 330.0, 325.0)
    stages, x = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], torch.ones(4, 4)

    def made() -> ps.Pipeline:
        schedule, sgd = ps.build("1f1b", 2, 2), torch.optim.SGD
        return ps.Pipeline(stages, schedule, loss_fn=torch.nn.MSELoss(), optimizer=sgd, adapt=ps.AdaptOptions())

    with made() as pipe:
        for _ in range(3):
            pipe.step(x, x)
        pipe.save(tmp_path)
    with made() as pipe:
        pipe.load(tmp_path)
        for _ in range(2):
            pipe.step(x, x)
        assert pipe._agent is not None
        assert pipe._agent._coordinator is not None
        pipe._agent._coordinator._hear(outcome_line(said))
        assert f"after iteration 5: {said}" in pipe.notices


@pytest.mark.slow
def test_a_store_that_comes_back_in_time_goes_on(tmp_path: Path) -> None:
    memory = TorchStore(dist.HashStore())
    gone = Gone(memory)
    with group(tmp_path, stores=[memory, memory, gone, memory], patience=30.0) as ranks:
        for _ in range(3):
            ranks.step(HEALTHY)
        gone.gone = True
        for _ in range(8):
            ranks.step(HEALTHY, heard=False)
        time.sleep(0.1)
        assert len(ranks.records()) == 3
        gone.gone = False
        ranks.until(LATE, lambda: ranks.agents[0].number == 1)
        assert all(one.notices == [] for one in ranks.agents)


@pytest.mark.slow
def test_a_controller_that_dies_ends_adapting_with_one_notice(tmp_path: Path) -> None:
    with group(tmp_path) as ranks:
        ranks.step(HEALTHY)
        coordinator = ranks.agents[0]._coordinator
        assert coordinator is not None
        assert coordinator._controller_process is not None
        coordinator._controller_process._process.kill()
        end = time.monotonic() + DEADLINE
        while not ranks.agents[3].notices and time.monotonic() < end:
            ranks.step(HEALTHY, heard=False)
            time.sleep(0.02)
        assert "the controller's process ended with exit code -9" in ranks.agents[0].notices[0]
        assert [len(one.notices) for one in ranks.agents] == [1] * NUM_RANKS
