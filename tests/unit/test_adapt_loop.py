"""The closed loop on emulated devices, a thread a rank: real time, real messages. No test asserts a time."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from packed import packed
from penstock.control import Configuration, replay
from penstock.control.configuration import peaks
from penstock.runtime import EmulatedPipeline, RuntimeFailure
from penstock.runtime.emulation import pipeline as emulation
from penstock.runtime.emulation.pipeline import EmulatedStep
from stores import running
from waiting import PATIENCE, keep_up, wait_until

pytestmark = pytest.mark.unit

NUM_RANKS = 4
COSTS = ps.Costs.uniform(NUM_RANKS, f=3, i=3, w=3)
ZB = ps.build("zb", NUM_RANKS, 6)
MOST_STEPS = 200
"""Steps within which a switch must come. One is due after some twenty, later where the machine is busy."""
HEALTHY_STEPS = 10
"""Steps before a link turns late. They are counted: the clock also runs while processes start on a busy machine."""
HEALTHY, LATE = ps.Links.parse("2:3=latency:0ms"), ps.Links.parse("2:3=latency:80ms")


def caps(schedule: ps.Schedule) -> tuple[float, ...]:
    return tuple(peaks(schedule, COSTS))


def unexpected(notices: Sequence[str]) -> list[str]:
    """A machine that is busy may slow something that no plan answers, and that is said."""
    return [notice for notice in notices if not notice.startswith("after iteration")]


def turn(pipe: EmulatedPipeline, links: ps.Links) -> None:
    """From the next step on, links are like that."""
    pipe._conditions.start(links, origin=pipe._conditions.origin)


def paced(folder: Path) -> Callable[[int], None]:
    """What waits, before each step from now on, until the controller has heard of those before."""
    records = folder / "iterations.jsonl"
    num_heard = records.read_bytes().count(b"\n") if records.exists() else 0
    return lambda step: keep_up(folder, num_heard + step)


def steps_until_switched(pipe: EmulatedPipeline, folder: Path, late: ps.Links) -> list[EmulatedStep]:
    """Steps with links as they are, then with late ones, up to the first step that runs something else."""
    wait = paced(folder)
    steps: list[EmulatedStep] = []
    while len(steps) < MOST_STEPS:
        if len(steps) == HEALTHY_STEPS:
            turn(pipe, late)
        wait(len(steps))
        steps.append(pipe.step())
        if steps[-1].number:
            return steps
    raise AssertionError(f"nothing was switched within {MOST_STEPS} steps: {pipe.decisions} {pipe.notices}")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["direct", pytest.param("host", marks=pytest.mark.nightly)])
def test_a_link_turns_late_and_another_plan_runs(tmp_path: Path, transport: str) -> None:
    limits = caps(ZB) if transport == "direct" else (6.0,) * NUM_RANKS  # sends that never wait leave little to gain
    adapt = ps.AdaptOptions(folder=tmp_path, memory_limit=limits)
    iterations = tmp_path / "iterations.jsonl"
    with ps.runtime.EmulatedPipeline(
        ZB, COSTS, links=HEALTHY, transport=transport, adapt=adapt, timeout=PATIENCE
    ) as pipe:
        steps = steps_until_switched(pipe, tmp_path, LATE)
        steps += [pipe.step() for _ in range(4)]
        wait_until(lambda: iterations.read_bytes().count(b"\n") >= len(steps) - 2, iterations.read_text)
    decisions = {
        decision.number: decision for decision in replay((tmp_path / "control.jsonl").read_text().splitlines())
    }
    assert decisions, "the log says what was decided"
    for step in steps:
        want = decisions[step.number].configuration if step.number else step.configuration
        assert step.configuration.digest == want.digest
        assert step.timeline.schedule == want.schedule
        assert step.timeline.dispatch == want.dispatch
        assert all(peak <= cap + 1e-9 for peak, cap in zip(step.timeline.peak_activations, limits, strict=True))
    numbers = [step.number for step in steps]
    assert numbers == sorted(numbers), "a switch is for good until the next one"
    for record in map(json.loads, iterations.read_text().splitlines()):
        step = steps[record["iteration"]]
        assert (record["number"], record["digest"]) == (step.number, step.configuration.digest)
        assert record["ms"] >= step.timeline.makespan - 1e-3
        assert record["peaks"] == list(step.timeline.peak_activations)
    assert unexpected(pipe.notices) == []


@pytest.mark.slow
def test_a_decision_that_counts_on_host_memory_keeps_the_device_s_cap_as_measured(tmp_path: Path) -> None:
    """Regression: caps were raised by the host memory, and nothing was moved there."""
    start = ps.build("zb-h1", NUM_RANKS, 6)
    adapt = ps.AdaptOptions(folder=tmp_path, host_memory=6.0, host_copy_ms=1.0)
    with ps.runtime.EmulatedPipeline(start, COSTS, links=HEALTHY, adapt=adapt, timeout=PATIENCE) as pipe:
        steps_until_switched(pipe, tmp_path, LATE)
        step = pipe.step()
    moves = [timed for timed in step.timeline.ops if timed.op.kind == "OFFLOAD"]
    assert moves
    assert len(moves) == sum(timed.op.kind == "RELOAD" for timed in step.timeline.ops)
    assert all(timed.end - timed.start >= 1.0 - 1e-6 for timed in moves), "copies take the time that was priced"
    assert step.configuration.caps == caps(start)
    held = step.timeline.peak_activations
    assert all(peak <= cap + 1e-9 for peak, cap in zip(held, caps(start), strict=True))
    assert 0 < max(pipe.decisions[-1]["in_host"]) <= 6.0
    assert unexpected(pipe.notices) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chimera", pytest.param("mllm", marks=pytest.mark.nightly)])
def test_what_is_not_planned_anew_is_dispatched_otherwise(name: str, tmp_path: Path) -> None:
    schedule = ps.build(name, NUM_RANKS, 8)
    healthy, late = ps.Links.parse("1:2=latency:0ms"), ps.Links.parse("1:2=latency:60ms")
    costs, adapt = ps.Costs.uniform(schedule.num_stages, f=3, i=3, w=3), ps.AdaptOptions(folder=tmp_path)
    with ps.runtime.EmulatedPipeline(schedule, costs, links=healthy, adapt=adapt, timeout=PATIENCE) as pipe:
        steps_until_switched(pipe, tmp_path, late)
        assert pipe.configuration.schedule == schedule
        assert pipe.configuration.dispatch == "dynamic"


def test_emulate_tells_what_each_step_ran() -> None:
    run = ps.emulate(
        ZB, COSTS, num_steps=3, adapt=ps.AdaptOptions(), transport=ps.TransportOptions("direct", depth=1)
    )
    assert run.numbers == (0, 0, 0)
    assert {each.digest for each in run.configurations} == {Configuration(ZB, "frozen", (), caps(ZB)).digest}  # type: ignore[arg-type]
    assert run.notices == ()


@pytest.mark.slow
def test_the_store_stands_still_and_dies_and_training_goes_on(tmp_path: Path) -> None:
    """It stands still for some steps, and is started anew; then the link turns late and is answered."""
    with running() as server:
        adapt = ps.AdaptOptions(store=server.address, folder=tmp_path, patience=PATIENCE)
        with ps.runtime.EmulatedPipeline(
            ZB, COSTS, links=HEALTHY, transport="direct", adapt=adapt, timeout=PATIENCE
        ) as pipe:
            pipe.step()
            server.signal(signal.SIGSTOP)
            for _ in range(25):
                pipe.step()
            server.signal(signal.SIGCONT)
            pipe.step()
            server.kill()
            for _ in range(5):
                pipe.step()
            server.start()
            steps_until_switched(pipe, tmp_path, LATE)
            assert unexpected(pipe.notices) == []
    assert replay((tmp_path / "control.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_a_store_that_is_gone_for_good_is_said_once() -> None:
    with running() as server:
        adapt = ps.AdaptOptions(store=server.address, patience=2.0)
        with ps.runtime.EmulatedPipeline(ZB, COSTS, adapt=adapt, timeout=PATIENCE) as pipe:
            pipe.step()
            server.kill()
            for _ in range(600):
                pipe.step()
                if unexpected(pipe.notices):
                    break
            for _ in range(3):
                pipe.step()
            (notice,) = unexpected(pipe.notices)
            assert "the store was out of reach for more than 2 s: the Redis at" in notice
            assert "and plan 0 stays" in notice


def test_regression_conditions_began_before_the_agent_had_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a link which was to turn late after 12 seconds turned late earlier than that in the run."""
    started, start_agent = list[int](), emulation.start_agent

    def start(*given: Any) -> Any:
        agent = start_agent(*given)
        started.append(time.perf_counter_ns())
        return agent

    monkeypatch.setattr(emulation, "start_agent", start)
    with EmulatedPipeline(ZB, COSTS, links=LATE, adapt=ps.AdaptOptions()) as pipe:
        assert started[0] <= pipe._conditions.origin <= pipe.step().began


def test_by_hand_switches_and_switches_back() -> None:
    other = ps.build("1f1b", NUM_RANKS, 6)
    with ps.runtime.EmulatedPipeline(ZB, COSTS, transport="direct", timeout=PATIENCE) as pipe:
        start = pipe.configuration
        then = Configuration(other, "dynamic", ((1, 2),), caps(other))  # type: ignore[arg-type]
        for number, configuration in enumerate((start, then, start, then), start=1):
            pipe.reconfigure(configuration)
            step = pipe.step()
            assert (step.number, step.configuration) == (number, configuration)
            assert step.timeline.schedule == configuration.schedule
            assert pipe.simulated([step])[0].schedule == configuration.schedule


def test_a_run_that_adapts_is_not_switched_by_hand() -> None:
    with (
        ps.runtime.EmulatedPipeline(ZB, COSTS, adapt=ps.AdaptOptions()) as pipe,
        pytest.raises(RuntimeFailure, match="leave adapt out"),
    ):
        pipe.reconfigure(pipe.configuration)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"transport": "pigeon"}, "transport 'pigeon': give 'host', 'gloo', 'direct', 'delegate' or 'nccl'"),
        ({"transport": "direct", "depth": 0}, "depth is 0; give a whole number of messages, at least 1"),
        ({"steering": ps.AdaptOptions(store="redis://127.0.0.1:1")}, "cannot be used"),
    ],
)
def test_what_can_not_be_is_said_before_anything_runs(options: dict[str, object], rule: str) -> None:
    with pytest.raises(RuntimeFailure, match=rule):
        ps.runtime.EmulatedPipeline(ZB, COSTS, **packed(**options))  # type: ignore[arg-type]
