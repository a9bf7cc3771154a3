"""`penstock links` over real processes: started by it, under torchrun, and on hosts of a lab."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from labs import START, needs_lab
from penstock.cli import main
from penstock.cost import Links
from penstock.lab import Lab
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.probe import PROBE
from penstock.tune.links import measure_links
from processes import appears, run_ranks
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc


ENOUGH = 60
"""Seconds for all links. Measuring ends sooner, once the messages take long enough."""


@pytest.mark.slow
def test_ranks_on_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"links --ranks 3 --seconds {ENOUGH} --json"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert [pair["link"] for pair in found["pairs"]] == ["0:1", "0:2", "1:2"]
    assert all(pair["loopback"] and pair["latency"] > 0 and pair["bandwidth"] > 0 for pair in found["pairs"])


@pytest.mark.slow
def test_under_torchrun_rank_0_prints() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*torchrun, "-m", "penstock", "links", "--seconds", f"{ENOUGH}"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "penstock:" not in ran.stderr, "ranks that end well say nothing"
    assert ran.stdout.count("1 link between 2 ranks on this host, over loopback, by gloo") == 1
    assert ran.stdout.count("Too few links to compare.") == 1


class ShortProbes(GroupPeers):
    """Waits one second for a probe, and `PATIENCE` for all else."""

    def explained(
        self, peer: int | None, what: str, timeout: float | None = None
    ) -> AbstractContextManager[timedelta]:
        return super().explained(peer, what, 1.0 if what.startswith(PROBE) else timeout)


SILENT, PARTNER = 2, 1
"""Of four ranks, the one that sends no probe, and the one that is first to wait for such a probe."""


def silent(rank: int, folder: str) -> None:
    """Measures, but for one rank that does not begin until its partner has given up."""
    kind = ShortProbes if rank == PARTNER else GroupPeers
    peers, said = kind(dist.group.WORLD, PATIENCE), Path(folder) / "said"  # type: ignore[arg-type]
    if rank == SILENT:
        peers.gather(("host", "network"))
        appears(said)
        return
    try:
        measure_links(peers, 1.0)
    finally:
        said.touch()


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named_with_the_deadline(tmp_path: Path) -> None:
    text = run_ranks(4, silent, str(tmp_path))[PARTNER].text
    assert "DeadlineExceeded" in text
    assert "waited 1 s for a probe of a link" in text
    assert f"from rank {SILENT}" in text


@needs_lab
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.xdist_group("lab")
def test_a_late_link_and_a_slow_one_are_named_in_the_lab() -> None:
    words = ["python", "-m", "penstock", "links", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Lab(num_hosts=4, links="2:3=latency:30ms 0:1=bandwidth:5Mbit/s") as lab:
        group = {"WORLD_SIZE": "4", "MASTER_ADDR": lab.address(0), "MASTER_PORT": "29500"}
        ranks = [lab.start(host, words, env={**group, "RANK": str(host)}, **pipes) for host in lab.hosts]
        ended = [rank.read(2 * START) for rank in ranks]
        assert [rank.poll() for rank in ranks] == [0] * 4, ended
    found = json.loads(ended[0][0])
    assert [out for out, _ in ended[1:]] == [""] * 3
    named = {pair["link"]: pair for pair in found["pairs"]}
    assert named["2:3"]["late"]
    assert named["0:1"]["slow"]
    assert named["0:1"]["slow_back"]
    assert named["2:3"]["latency"] == pytest.approx(30, rel=0.2)
    assert named["0:1"]["bandwidth"] == pytest.approx(625_000, rel=0.2)
    assert named["0:1"]["bandwidth_back"] == pytest.approx(625_000, rel=0.2)
    read = Links.parse(found["links"])
    assert {(0, 1), (2, 3)} <= read.conditions.keys()
