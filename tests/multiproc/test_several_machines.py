"""The tutorial's lines, and the recipes for Slurm and Kubernetes, over two hosts of a lab: processes die, a network
goes, and the run continues."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from documents import PAGES, ROOT, blocks, shown_files
from labs import needs_lab, until
from penstock.lab import Lab
from train_runs import SMALL, losses

yaml = pytest.importorskip("yaml")

pytestmark = [pytest.mark.multiproc, pytest.mark.alone, pytest.mark.nightly, needs_lab, pytest.mark.timeout(600)]

EXAMPLES = ROOT / "examples"
STEPS, SAVED = 24, 4
WORDS = f"{SMALL} --schedule zb-h1 --steps {STEPS} --save-every {SAVED} --threads 1 --set timeout=30".split()
HOSTS = 2
LATE = 240.0
"""Seconds that the rounds of two hosts may take on a busy machine."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run in one process that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    program = "import sys; from penstock.cli import main; sys.exit(main())"
    words = ["train", "--in-process", "--ranks", str(HOSTS), *WORDS, "--out", str(folder)]
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True, timeout=200)
    return losses(folder)


def descendants(pid: int) -> list[int]:
    """Processes below one, the nearest first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        children = [int(each) for each in task.read_text().split()]
        found += children + [one for child in children for one in descendants(child)]
    return found


def rank_below(pid: int) -> int | None:
    """The rank that a torchrun has started."""
    for each in descendants(pid):
        words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
        if b"penstock.train" in words and b"--rdzv-backend" not in words and b"--rdzv-backend=c10d" not in words:
            return each
    return None


class Hosts:
    """The same line on both hosts of a lab, and what they write."""

    def __init__(self, lab: Lab, folder: Path, command: list[str], environment: dict[str, str]) -> None:
        self._lab, self._folder, self._command, self._environment = lab, folder, command, environment
        self.started = [self.start(host) for host in range(HOSTS)]

    def start(self, host: int) -> Any:
        with (self._folder / f"host{host}.txt").open("a") as said:
            return self._lab.start(host, self._command, self._environment, stdout=said, stderr=subprocess.STDOUT)

    def said(self) -> str:
        return "\n".join((self._folder / f"host{host}.txt").read_text()[-4000:] for host in range(HOSTS))

    def wait_for_a_checkpoint(self, run: Path, step: int = SAVED) -> None:
        first = run / "checkpoints" / f"step-{step:08}"
        until(lambda: first.exists() or any(each.poll() is not None for each in self.started), LATE)
        assert first.exists(), self.said()
        assert not (run / "report.json").exists(), "the run had ended before anything happened"

    def end(self, restarts: int = 0) -> None:
        """All must end well; so many times in all what ended otherwise is started again, as a Job does."""
        while any(each.poll() != 0 for each in self.started):
            assert until(lambda: any(each.poll() for each in self.started) or self._well(), LATE), self.said()
            failed = [host for host, each in enumerate(self.started) if each.poll()]
            restarts -= len(failed)
            assert restarts >= 0, self.said()
            for host in failed:
                self.started[host] = self.start(host)

    def _well(self) -> bool:
        return all(each.poll() == 0 for each in self.started)


def stand_in(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text(f"#!/usr/bin/env bash\n{body}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_slurm_s_script_goes_on_after_a_rank_was_killed(tmp_path: Path, undisturbed: list[float]) -> None:
    programs, run = tmp_path / "bin", tmp_path / "run"
    programs.mkdir()
    stand_in(programs, "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    stand_in(programs, "scontrol", "printf 'host0\\nhost1\\n'")
    given = {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}", "RUN": str(run),
        "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host[0-1]", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = ["bash", str(EXAMPLES / "slurm" / "train.sbatch"), *WORDS]
    with Lab(num_hosts=HOSTS) as lab:
        hosts = Hosts(lab, tmp_path, command, given)
        hosts.wait_for_a_checkpoint(run)
        victim = rank_below(hosts.started[1].pid)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        hosts.end()
    assert len(undisturbed) == STEPS
    assert losses(run) == undisturbed


def test_kubernetes_job_goes_on_after_a_pod_was_taken_away(tmp_path: Path, undisturbed: list[float]) -> None:
    _, job = yaml.safe_load_all((EXAMPLES / "kubernetes" / "train.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    run = tmp_path / "run"
    given = {each["name"]: each["value"] for each in container["env"]} | {"RUN": str(run), "FIRST": "host0:29500"}
    words = [*container["command"], *container["args"]]
    for name, value in given.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not any("$(" in word for word in words)
    words += [word for word in WORDS if word not in ("--schedule", "zb-h1")]
    with Lab(num_hosts=HOSTS) as lab:
        hosts = Hosts(lab, tmp_path, words, {"OMP_NUM_THREADS": "1"})
        hosts.wait_for_a_checkpoint(run)
        ranks = descendants(hosts.started[1].pid)
        for pid in [hosts.started[1].pid, *ranks]:  # torchrun itself too
            os.kill(pid, signal.SIGKILL)
        hosts.end(restarts=6)
    assert losses(run) == undisturbed


def line_of(name: str) -> str:
    """The docs' line whose run lies in `runs/NAME`."""
    found = [block.text for page in PAGES for block in blocks(page)]
    (line,) = [text for text in found if re.search(rf"--out runs/{name}\b", text) and "--resume runs/one" not in text]
    return line


BESIDE = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
AT = 50
"""The step of the first checkpoint of these runs."""


def on_one_machine(folder: Path, line: str) -> list[float]:
    """The losses of the run in `runs/one` that a line makes, with the files that pages show."""
    for name, text in shown_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    subprocess.run(
        ["bash", "-c", line], cwd=folder, env=os.environ | BESIDE, check=True, capture_output=True, timeout=200
    )
    return losses(folder / "runs" / "one")


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the lines that train the preset nano, on one machine."""
    line = "penstock train --preset nano --ranks 2 --threads 1 --steps 200 --save-every 50 --out runs/one"
    return on_one_machine(tmp_path_factory.mktemp("nano"), line)


def on_both(lab: Lab, folder: Path, name: str) -> Hosts:
    """Both hosts at a line of the tutorial, whose run has its first checkpoint."""
    hosts = Hosts(lab, folder, ["bash", "-c", f"cd {folder}\n{line_of(name)}"], BESIDE)
    hosts.wait_for_a_checkpoint(folder / "runs" / name, AT)
    return hosts


def test_the_tutorial_s_line_goes_on_after_a_process_was_killed(tmp_path: Path) -> None:
    """A model of one's own has the losses of one machine over two, although a rank was killed."""
    one = on_one_machine(tmp_path, line_of("one"))
    with Lab(num_hosts=HOSTS) as lab:
        hosts = on_both(lab, tmp_path, "two")
        victim = rank_below(hosts.started[1].pid)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        hosts.end()
    assert losses(tmp_path / "runs" / "two") == one


def test_the_tutorial_s_loop_goes_on_after_a_host_was_lost(tmp_path: Path, nano: list[float]) -> None:
    with Lab(num_hosts=HOSTS) as lab:
        hosts = on_both(lab, tmp_path, "loop")
        shell = hosts.started[1].pid
        for pid in [shell, *descendants(shell)]:
            os.kill(pid, signal.SIGKILL)
        assert until(lambda: hosts.started[1].poll() is not None, LATE)
        hosts.started[1] = hosts.start(1)
        hosts.end()
        assert "PeerLost" in hosts.said()
    assert losses(tmp_path / "runs" / "loop") == nano


def test_the_tutorial_s_run_goes_on_over_the_other_network(tmp_path: Path, nano: list[float]) -> None:
    """Both ranks end well, too: they ended by SIGABRT when all was done, as a thread of gloo still waited."""
    with Lab(num_hosts=HOSTS) as lab:
        hosts = on_both(lab, tmp_path, "nets")
        lab.interface_down(1, 1)
        hosts.end()
        assert "goes by interface 10.90.0.1 now" in " ".join(hosts.said().replace("\n", " ").split())
    assert losses(tmp_path / "runs" / "nets") == nano
