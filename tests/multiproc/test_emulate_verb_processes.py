"""`penstock emulate` with one process a rank: messages are sent, ends are clean."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from stores import running
from train_runs import Run, metrics

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks by /proc"),
]


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"f": 5, "i": 5, "w": 5, "message_bytes": 100_000}))
    return path


def options(folder: Path, costs: Path, steps: int) -> str:
    plan = "zb --dispatch frozen --ranks 2 --microbatches 6"
    return f"{plan} --costs {costs} --steps {steps} --out {folder}"


@pytest.mark.slow
def test_messages_pass_between_processes(tmp_path: Path, costs: Path) -> None:
    folder = tmp_path / "run"
    with Run(
        folder, f"{options(folder, costs, 3)} --link 0:1=bandwidth:10MB/s+latency:5ms --json", verb="emulate"
    ) as run:
        ended = run.end()
    assert ended.code == 0, ended.err
    report = ended.json
    links = ps.Links.parse("0:1=bandwidth:10MB/s+latency:5ms")
    simulated = ps.simulate(
        ps.build("zb", 2, 6), ps.Costs([5, 5], [5, 5], [5, 5], message_bytes=[100_000] * 2), links=links
    )
    rows = metrics(folder)
    assert [row["simulated_ms"] for row in rows] == pytest.approx([simulated.makespan] * 3)
    assert all(row["ms"] >= max(simulated.busy) for row in rows)
    assert report["steps"] == 3
    assert set(report["steered"]["links"]) == {"0>1", "1>0"}
    lines = [json.loads(line) for line in (folder / "control.jsonl").read_text().splitlines()]
    seen = [line["event"]["transfers"]["ms"] for line in lines if "transfers" in line.get("event", {})]
    assert {len(times) for times in seen} == {6}
    # The first message waits for no other. How long later ones wait is estimated, which a busy machine can disturb.
    assert all(times[0] >= 14.9 for times in seen), "10 ms for its bytes and 5 on the way"


@pytest.mark.slow
def test_a_killed_rank_ends_all_with_one_message(tmp_path: Path, costs: Path) -> None:
    folder = tmp_path / "run"
    with Run(folder, options(folder, costs, 1000), verb="emulate") as run:
        run.wait_for(lambda: len(metrics(folder)) >= 2)
        run.kill(1)
        ended = run.end()
    assert ended.code == 128 + signal.SIGKILL
    told = [line for line in ended.err.splitlines() if line.startswith("penstock: ")]
    assert len(told) == 1
    assert "rank 1" in told[0]
    assert ended.out == ""


@pytest.fixture
def redis() -> Iterator[str]:
    with running() as server:
        yield server.address


@pytest.mark.usefixtures("interruptible")
@pytest.mark.slow
def test_reports_go_by_redis_and_ctrl_c_ends_it(tmp_path: Path, costs: Path, redis: str) -> None:
    folder = tmp_path / "run"
    more = f"--adapt --set store={redis} --link 0:1=latency:steps:0ms/0ms,1s/40ms"
    with Run(folder, f"{options(folder, costs, 100_000)} {more} --json", verb="emulate") as run:
        run.wait_for(lambda: len(metrics(folder)) >= 8)
        run.signal(signal.SIGINT)
        ended = run.end()
    assert ended.code == 130, ended.err
    report = ended.json
    assert report["interrupted"] is True
    assert report["steps"] >= 8
    assert set(report["steered"]["links"]) == {"0>1", "1>0"}
