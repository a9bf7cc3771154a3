"""`penstock links` over real processes: started by it, under torchrun, and on hosts of a lab."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist

from labs import START, needs_lab
from penstock.cli import main
from penstock.cost import Links
from penstock.lab import Lab
from penstock.runtime.mesh.peers import GroupPeers
from penstock.tune.links import measure_links
from processes import run_ranks

pytestmark = pytest.mark.multiproc


@pytest.mark.slow
def test_ranks_on_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    words = "links --ranks 3 --seconds 4 --json"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert [pair["link"] for pair in found["pairs"]] == ["0:1", "0:2", "1:2"]
    assert all(pair["loopback"] and pair["latency"] > 0 for pair in found["pairs"])
    known = [pair["bandwidth"] for pair in found["pairs"] if pair["bandwidth"] is not None]  # as far as time allowed
    assert known
    assert min(known) > 0


@pytest.mark.slow
def test_under_torchrun_rank_0_prints() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*torchrun, "-m", "penstock", "links", "--seconds", "0.5"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("1 link between 2 ranks on this host, over loopback, by gloo") == 1
    assert ran.stdout.count("Too few links to compare.") == 1


def silent(rank: int, silent_rank: int) -> Any:
    """Measures, but for one rank that never begins."""
    peers = GroupPeers(dist.group.WORLD, 3.0)  # type: ignore[arg-type]
    if rank != silent_rank:
        return measure_links(peers, 1.0).late
    peers.gather(("host", "network"))
    time.sleep(8)
    return None


def test_a_rank_that_does_not_answer_is_named_with_the_deadline() -> None:
    first = min(run_ranks(4, silent, 2), key=lambda each: ("waited 3 s" not in each.text, each.rank == 2))
    assert "DeadlineExceeded" in first.text
    assert "waited 3 s for a probe of a link" in first.text
    assert "from rank 2" in first.text


@needs_lab
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.xdist_group("lab")
def test_a_late_link_and_a_slow_one_are_named_in_the_lab() -> None:
    words = ["torchrun", "-m", "penstock", "links", "--json"]
    with Lab(num_hosts=4, links="2:3=latency:30ms 0:1=bandwidth:5Mbit/s") as lab:
        ranks = [lab.start(host, words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for host in lab.hosts]
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
