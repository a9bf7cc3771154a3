"""The benchmark of `--adapt`: how runs are judged, on records made by hand and on a rehearsed run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.control import Controller, rehearse
from penstock.cost import Links
from report_cases import job

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "benchmarks" / "adapt"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"adapt_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


JUDGE = module("judge")


def rows(times: list[float], numbers: list[int], late: int | None = None) -> list[str]:
    """Lines of iterations.jsonl; link 2:3 is late from step `late` on."""
    return [
        json.dumps(
            {
                "iteration": at,
                "ms": ms,
                "number": number,
                "links": {"2:3": 30.0 if late is not None and at >= late else 0.3, "3:2": 0.3},
            }
        )
        for at, (ms, number) in enumerate(zip(times, numbers, strict=True))
    ]


def decision(number: int, made: int, reason: str = "link 0:1: 1 -> 5 ms", action: str = "delegate") -> str:
    return json.dumps({"decision": {"number": number, "iteration": made, "action": action, "reason": reason}})


def judged(control: list[str], lines: list[str], fault: bool = False) -> dict[str, Any]:
    return dict(JUDGE.judge(control, lines, (2, 3), 30.0) if fault else JUDGE.judge(control, lines))


def test_a_false_decision_that_is_slower_may_run_10_steps_and_no_more() -> None:
    for ran, ok in ((10, True), (11, False)):
        numbers = [0] * 20 + [1] * ran + [2] * 10
        times = [110.0] * 20 + [206.0] * ran + [110.0] * 10
        found = judged([decision(1, 18), decision(2, 19 + ran, "slower", "take back")], rows(times, numbers))
        assert found["false"] == [
            {"number": 1, "made": 18, "action": "delegate", "ran": ran, "before": 110.0, "with": 206.0, "ok": ok}
        ]
        assert found["false_ok"] is ok
        assert (found["decisions"], found["taken_back"]) == (1, 1)


def test_a_false_decision_that_is_not_slower_may_stay() -> None:
    found = judged([decision(1, 18)], rows([110.0] * 20 + [111.0] * 30, [0] * 20 + [1] * 30))
    assert found["false_ok"]


def test_before_the_fault_and_of_another_link_is_false() -> None:
    times, numbers = [100.0] * 20 + [300.0] * 5 + [200.0] * 15, [0] * 25 + [1] * 15
    right = judged([decision(1, 22, "link 3:2: 0 -> 30 ms")], rows(times, numbers, 20), fault=True)
    assert (right["false"], right["onset"], right["answered"], right["made"], right["ran_from"]) == (
        [],
        20,
        True,
        22,
        25,
    )
    late = judged([decision(1, 23, "link 2:3: 0 -> 30 ms")], rows(times, numbers, 20), fault=True)
    assert (late["answered"], late["answered_late"]) == (False, True)
    other = judged([decision(1, 22)], rows(times, numbers, 20), fault=True)
    assert other["false_ok"], "200 ms are less than the fault's 300"
    assert len(other["false"]) == 1
    assert not other["answered"]
    early = judged([decision(1, 10, "link 2:3: 0 -> 30 ms")], rows(times, [0] * 12 + [1] * 28, 20), fault=True)
    assert [each["before"] for each in early["false"]] == [100.0]
    assert not early["answered"]


def test_messages_that_are_late_for_once_are_not_the_fault() -> None:
    values = [json.loads(line) for line in rows([100.0] * 40, [0] * 40, 30)]
    for at in (0, 7, 8):
        values[at]["links"]["3:2"] = 40.0
    assert JUDGE.onset(values, (2, 3), 30.0) == 30


def test_the_run_s_own_reason_counts_where_it_names_caps_or_noise() -> None:
    lines = rows([100.0] * 20 + [300.0] * 20, [0] * 40, 20)
    for obstacle, explained in (("memory", True), ("noise", True), ("pause", False)):
        said = json.dumps({"unanswered": {"obstacle": obstacle, "why": "why", "cause": {"2:3": 30.0}}})
        assert judged([said], lines, fault=True)["explained"] is explained
    other = json.dumps({"unanswered": {"obstacle": "memory", "why": "why", "cause": {"0:1": 30.0}}})
    assert not judged([other], lines, fault=True)["explained"]


def test_a_rehearsed_run_is_answered_within_three_steps() -> None:
    lines: list[str] = []
    run = rehearse(
        Controller(job(), log=lines.append), Links.parse("2:3=latency:steps:0ms/0ms,6s/30ms"), until=14_000
    )
    late = next(each.number for each in run.iterations if each.start + each.ms > 6_000)
    records = rows([each.ms for each in run.iterations], [each.decision for each in run.iterations], late)
    found = judged(lines, records, fault=True)
    assert found["answered"]
    assert found["false"] == []
    assert [each["kept"] for each in found["verdicts"]] == [True]


def test_the_cells_and_faults_of_the_protocol(tmp_path: Path) -> None:
    sys.path.insert(0, str(FOLDER))
    try:
        run = module("run")
    finally:
        sys.path.remove(str(FOLDER))
    assert len(run.CELLS) == 8
    assert run.fault_of("real-busy-none", 3) is None
    assert run.fault_of("emulated-quiet-fault", 4) == ((1, 2), 30.0, 6.0 + 3 * 8 / 20)
    command = run.command_of("emulated-quiet-fault", 4, tmp_path, tmp_path / "costs.json")
    assert command[-2:] == ["--link", "1:2=latency:steps:0s/0ms,7200ms/30ms"]
    moments = {run.fault_of("real-busy-fault", seed)[2] for seed in range(20)}
    assert len(moments) == 20


def test_a_summary_says_what_must_hold(tmp_path: Path) -> None:
    sys.path.insert(0, str(FOLDER))
    try:
        run = module("run")
    finally:
        sys.path.remove(str(FOLDER))
    row = {"false": [], "false_ok": True, "answered": True, "explained": False, "reruns": [], "commit": "abc"}
    for seed in range(20):
        for cell in run.CELLS:
            (tmp_path / cell).mkdir(exist_ok=True)
            (tmp_path / cell / f"seed-{seed:02d}.json").write_text(json.dumps(row | {"seed": seed}))
    assert run.summary(tmp_path, "command")["holds"]
    unanswered = row | {"seed": 3, "answered": False, "explained": True}
    for seed in (3, 4):
        path = tmp_path / "emulated-quiet-fault" / f"seed-{seed:02d}.json"
        path.write_text(json.dumps(unanswered | {"seed": seed}))
        assert run.summary(tmp_path, "command")["holds"] is (seed == 3), "19 of 20 are enough, 18 are not"
