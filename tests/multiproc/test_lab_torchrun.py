"""Training by torchrun over two hosts of a lab, one network of which goes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from labs import needs_lab, until
from penstock.cli import main
from penstock.lab import Lab
from train_runs import losses, metrics

pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("lab"), needs_lab, pytest.mark.timeout(500)]

NUM_STEPS = 60
"""Of which most are left when a busy machine gets to the interface that dies."""
SMALL = (
    "--preset nano --depth 4 --width 16 --heads 2 --context 16 --batch 8 --microbatches 4 --sample 0 --threads 1 "
    f"--evaluate-every 0 --save-every 0 --steps {NUM_STEPS}"
)


@pytest.mark.nightly
def test_torchrun_over_two_hosts_gives_the_losses_of_one_though_an_interface_dies(tmp_path: Path) -> None:
    words = ["torchrun", "-m", "penstock.train", *SMALL.split(), "--transport", "delegate"]
    with Lab(links="0:1=latency:20ms") as lab:
        ranks = [
            lab.start(
                host, [*words, "--out", str(tmp_path / "hosts")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for host in lab.hosts
        ]
        assert until(lambda: len(metrics(tmp_path / "hosts")) >= 3, 200), ranks[0].read(5)
        lab.interface_down(0, 1)
        assert len(losses(tmp_path / "hosts")) < NUM_STEPS, "it had ended before"
        ended = [rank.read(200) for rank in ranks]
        assert [rank.poll() for rank in ranks] == [0, 0], ended
        carried = {(way["source"], way["nic"]): way["num_bytes"] for way in lab.ways()}
    bytes_a_step = 8 * 16 * 16 * 4
    assert min(carried[0, 1], carried[1, 1]) > 2 * bytes_a_step, "activations and gradients went over network 1"
    own = [*SMALL.split(), "--ranks", "2", "--in-process", "--out", str(tmp_path / "here"), "--json"]
    assert main(["train", *own]) == 0
    assert losses(tmp_path / "hosts") == losses(tmp_path / "here")
    assert len(losses(tmp_path / "here")) == NUM_STEPS
