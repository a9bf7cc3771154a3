"""Training that is killed, or whose disk fills, at a chosen call of a chosen function, and then goes on.

    outcome = apart(Fault("switching", "penstock.runtime.pipeline:Pipeline._switch", call=1, rank=1), folder)

A scenario launches ranks that train, save every other step and change what they run on the way; then it launches them
again, and they go on from the newest checkpoint. `python fault_runs.py scenario JSON FOLDER` runs one in a process of
its own, as a private mount of a small disk needs it. Nothing in the package knows of it: the rank patches functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crashes import UNSHARE, may_mount
from packed import packed
from waiting import PATIENCE, wait_until

MARK = "PENSTOCK_FAULT_RUN"
STEPS, CHANGES, EVERY = 8, (3, 6), 2
"""Steps; those before which what runs changes; how often a checkpoint is written."""
NUM_MICROBATCHES = 4
TIMEOUT = PATIENCE
DISK = "24m"
"""Of the disk that fills: it holds some checkpoints, and all that the runtime writes."""


@dataclass(frozen=True)
class Fault:
    """Attributes:
    phase: "switching", "delegating" or "handing over": what the ranks do before the steps in `CHANGES`.
    at: module:function or module:Class.method; call: its how-manieth call in the rank, from 1.
    when: "before" or "after" it. rank: whose.
    action: "kill" (the rank), "kill delegates" (those of the rank), or "fill" (the disk).
    """

    phase: str
    at: str
    call: int = 1
    when: str = "before"
    rank: int = 0
    action: str = "kill"

    def __str__(self) -> str:
        return (
            f"{self.phase}: {self.action} {self.when} call {self.call} of {self.at.partition(':')[2]} on {self.rank}"
        )


@dataclass(frozen=True)
class Outcome:
    """How a scenario went.

    Attributes:
        code, said: of the launch with the fault; struck: whether the fault was reached.
        losses: of all steps at the end, hexadecimal, once it has gone on; resumed: that launch's exit code and words.
        left: processes of ours that outlived a launch; shared: what was left in /dev/shm.
    """

    code: int
    said: str
    struck: bool
    losses: list[str]
    resumed: tuple[int, str]
    left: list[str]
    shared: list[str]


def points() -> list[Fault]:
    """Where a run of each phase can be struck: every step of the way, on either rank."""
    at = {
        "switching": (
            ("penstock.runtime.pipeline:Pipeline.reconfigure", (1, 2)),
            ("penstock.runtime.local_pipeline:activate", (2, 3)),
            ("penstock.runtime.pipeline:Pipeline._switch", (1, 2)),
            ("penstock.runtime.execute.executors:StepExecutor.run", (4, 7)),
            ("penstock.runtime.execute.worker:Worker.run_ready", (8,)),
        ),
        "delegating": (
            ("penstock.runtime.transport.delegate.transport:DelegateTransport.prepare", (1,)),
            ("penstock.runtime.transport.delegate.boxes:DelegateProcess.meet", (1,)),
            ("penstock.runtime.transport.routed:RoutedTransport.route", (3, 4, 6)),
            ("penstock.runtime.transport.delegate.transport:DelegateTransport.send", (1, 3)),
            ("penstock.runtime.transport.delegate.transport:DelegateTransport.take", (1, 4)),
            ("penstock.runtime.transport.delegate.transport:DelegateTransport.end", (1,)),
            ("penstock.runtime.transport.delegate.transport:DelegateTransport.close", (1,)),
        ),
        "handing over": (
            ("penstock.runtime.node_moves:device_mesh_of", (1, 2)),
            ("penstock.runtime.node_moves:_require_movable", (1, 2)),
            ("penstock.runtime.node_moves:hand_over", (1, 2)),
            ("penstock.runtime.checkpoint.state_transfer:sendings", (1,)),
            ("penstock.runtime.checkpoint.state_transfer:_exchange", (1, 2)),
            ("penstock.runtime.node_moves:end_groups", (1, 2)),
        ),
    }
    return [
        Fault(phase, where, call, when, rank)
        for phase, places in at.items()
        for where, calls in places
        for call in calls
        for when in ("before", "after")
        for rank in (0, 1)
    ]


def filling() -> list[Fault]:
    """The same places, where the disk fills instead; once each, on the rank that writes most."""
    return [dataclasses.replace(each, action="fill") for each in points() if each.rank == 0]


def without_delegates() -> list[Fault]:
    """Places where a rank's delegate dies and the rank does not: the run ends, and says whose it was."""
    return [
        dataclasses.replace(each, action="kill delegates")
        for each in points()
        if each.phase == "delegating" and each.at.rpartition(".")[2] in ("send", "take", "end", "route")
    ]


# The parent.


def scenario(fault: Fault, folder: Path, own: bool) -> Outcome:
    """Runs the ranks into the fault, and then to the end. `own`: no other program sees this /dev/shm."""
    folder.mkdir(parents=True, exist_ok=True)
    before = _shared(own)
    code, said = _launch(fault, folder, resume=False)
    left = _outlive(folder)
    (folder / "disk" / "ballast").unlink(missing_ok=True)
    resumed = _launch(fault, folder, resume=True)
    left += _outlive(folder)
    losses = (folder / "losses").read_text().split() if (folder / "losses").exists() else []
    struck = (folder / "struck").exists()
    return Outcome(code, said, struck, losses, resumed, left, sorted(_shared(own) - before))


def undisturbed(phase: str, folder: Path) -> list[str]:
    """The losses of a run that nothing strikes and that changes nothing on the way."""
    from processes import forkserver

    folder.mkdir(parents=True, exist_ok=True)
    forkserver()  # from which ranks are forked
    code, said = _launch(Fault(phase, ""), folder, resume=False, changes=False)
    assert code == 0, said
    return (folder / "losses").read_text().split()


def apart(fault: Fault, folder: Path) -> Outcome:
    """The scenario in a process of its own. Where that may be, it sees a /dev/shm of its own, and a small disk."""
    command = [
        sys.executable,
        __file__,
        "scenario",
        json.dumps(dataclasses.asdict(fault)),
        str(folder),
        str(int(may_mount())),
    ]
    if may_mount():
        disk = folder / "disk"
        disk.mkdir(parents=True, exist_ok=True)
        mounts = f'mount -t tmpfs none /dev/shm && mount -t tmpfs -o size={DISK} none "$0" && exec "$@"'
        command = [*UNSHARE, "sh", "-c", mounts, str(disk), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout.splitlines()[-1])
    return Outcome(**value | {"resumed": tuple(value["resumed"])})


def wrong(fault: Fault, outcome: Outcome, expected: list[str]) -> list[str]:
    """What is not as it must be, in words."""
    found = []
    said = outcome.said.splitlines()
    if not outcome.struck:
        found.append("the fault was never reached")
    if fault.action == "kill":
        named = f"penstock: rank {fault.rank} was killed by SIGKILL"
        if outcome.code != 137 or not said or not said[0].startswith(named) or len(said) > 2:
            found.append(f"ended with {outcome.code} and not with one message that names the rank: {outcome.said}")
    elif fault.action == "kill delegates":
        if outcome.code and not any(f"the delegate of rank {fault.rank} ended" in line for line in said):
            found.append(f"ended with {outcome.code} and not with a message that names the delegate: {outcome.said}")
    elif outcome.code and (fault.action != "fill" or len(said) > 2 or "No space left on device" not in said[0]):
        found.append(f"ended with {outcome.code} and not with one clear message: {outcome.said}")
    if outcome.resumed[0]:
        found.append(f"could not go on: {outcome.resumed[1]}")
    elif outcome.losses != expected:
        found.append(f"went on with other losses: {outcome.losses} in place of {expected}")
    if outcome.left:
        found.append(f"processes are left: {outcome.left}")
    if outcome.shared:
        found.append(f"/dev/shm is not clean: {outcome.shared}")
    return found


def _launch(fault: Fault, folder: Path, resume: bool, changes: bool = True) -> tuple[int, str]:
    from penstock.runtime.launch import launch

    said = io.StringIO()
    words = [json.dumps(dataclasses.asdict(fault)), str(folder), str(int(resume)), str(int(changes))]
    mark = {MARK: str(folder), "OMP_NUM_THREADS": "1"}
    with contextlib.redirect_stderr(said):
        num_ranks = 4 if fault.phase == "handing over" else 2
        code = launch([__file__, "rank", *words], num_ranks, env=mark)
    return code, said.getvalue().strip()


def _outlive(folder: Path) -> list[str]:
    """Processes of a launch that has ended which do not end too. Those that were killed may still be ending."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not _left(folder), lambda: "", seconds=30.0)
    return _left(folder)


def _left(folder: Path) -> list[str]:
    """Processes that were started by a launch in this folder and are there."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes()
            is_rank = (path / "comm").read_text().startswith("rank ")
            is_server = b"from multiprocessing." in command and not is_rank  # which ends with this process
            if f"{MARK}={folder}\0".encode() in (path / "environ").read_bytes() and not is_server:
                found.append(f"{path.name} {command[:120]!r}")
    return found


def _shared(own: bool) -> set[str]:
    """What lies in /dev/shm: all of it where no other program sees that one, else what has our name."""
    return {each.name for each in Path("/dev/shm").glob("*") if own or "penstock" in each.name}


# A rank.


def strike(fault: Fault, folder: Path, delegates: Callable[[], list[int]]) -> None:
    """Patches the function, so that its call strikes."""
    module, _, path = fault.at.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    original = getattr(owner, name)
    count = 0

    def act() -> None:
        if fault.action == "fill":
            with contextlib.suppress(OSError), open(folder / "disk" / "ballast", "wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(1 << 12))
        (folder / "struck").touch()
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "kill delegates":
            for pid in delegates():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def patched(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        mine = count == fault.call
        if mine and fault.when == "before":
            act()
        result = original(*args, **options)
        if mine and fault.when == "after":
            act()
        return result

    setattr(owner, name, patched)


def rank(fault: Fault, folder: Path, resume: bool, changes: bool) -> None:
    """Trains, and changes what runs on the way."""
    import torch

    from penstock.runtime.checkpoint import latest
    from penstock.runtime.launch import init_process

    me, _ = init_process(TIMEOUT)
    torch.set_num_threads(1)
    if fault.at and not resume and me == fault.rank:
        strike(fault, folder, lambda: list(run.delegates()))
    run = _Moves() if fault.phase == "handing over" else _Switches(fault.phase)
    checkpoints = folder / "disk" / "checkpoints"
    start = 0
    if resume and latest(checkpoints) is not None:
        run.pipe.load(checkpoints)
        start = run.pipe.num_steps
    if me == 0 and resume:
        kept = (folder / "losses").read_text().splitlines(True)[:start] if start else []
        (folder / "losses").write_text("".join(kept))
    for step in range(start, STEPS):
        if changes and step in CHANGES:
            run.change(CHANGES.index(step))
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, generator=generator)
        result = run.pipe.step(x, torch.cos(x))
        if me == 0:
            with open(folder / "losses", "a") as losses:
                losses.write(float(result.loss).hex() + "\n")
        if (step + 1) % EVERY == 0:
            run.pipe.save(checkpoints, keep=2)
    run.pipe.close()


def _pipeline(schedule: str, num_stages: int, makes: bool = False, **options: Any) -> Any:
    """Dropout draws by the step, statistics are buffers, and the ends share a weight.

    Args:
        makes: whether stages are given as functions, so that nodes can change places.
    """
    import torch
    from torch import nn

    import penstock as ps

    torch.manual_seed(7)

    def stage() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))

    return ps.Pipeline(
        [stage if makes else stage() for _ in range(num_stages)],
        ps.build(schedule, num_stages, NUM_MICROBATCHES),
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.AdamW,
        timeout=TIMEOUT,
        **packed(clip_norm=0.5, tied=[("0.0.weight", f"{num_stages - 1}.0.weight")], **options),
    )


class _Switches:
    """Another schedule and dispatch, or a link handed to delegates, and back."""

    def __init__(self, phase: str) -> None:
        import penstock as ps

        self._phase = phase
        self.pipe = _pipeline("1f1b", 2, delegates=ps.runtime.DelegateOptions())

    def change(self, number: int) -> None:
        import penstock as ps
        from penstock.control import Configuration
        from penstock.dispatch import Dispatch

        now = self.pipe.configuration
        if self._phase == "delegating":
            then = dataclasses.replace(now, delegated=() if number else ((0, 1),))
        else:
            name, dispatch = (("zb-h1", "dynamic"), ("1f1b", "frozen"))[number]
            then = Configuration(ps.build(name, 2, NUM_MICROBATCHES), Dispatch(dispatch), (), (8.0, 8.0))
        self.pipe.reconfigure(then)

    def delegates(self) -> Iterator[int]:
        yield from self.pipe._local.transport.delegates.pids.values()


class _Moves:
    """Two pipelines of two stages, whose nodes change places, and back."""

    def __init__(self) -> None:
        import penstock as ps

        self.pipe = _pipeline("1f1b", 2, mesh=ps.runtime.device_mesh(ps.Mesh(2, 2)), makes=True)

    def change(self, number: int) -> None:
        from penstock.runtime.mesh.process_mesh import KEEPS_ORDER

        other = (2, 1, 0, 3) if KEEPS_ORDER else (0, 2, 1, 3)
        nodes = (0, 1, 2, 3) if number else other
        self.pipe.reconfigure(dataclasses.replace(self.pipe.configuration, nodes=nodes))

    def delegates(self) -> Iterator[int]:
        return iter(())


if __name__ == "__main__":
    what, words, where, *flags = sys.argv[1:]
    given = Fault(**json.loads(words))
    if what == "rank":
        rank(given, Path(where), *(bool(int(flag)) for flag in flags))
    else:
        print(json.dumps(dataclasses.asdict(scenario(given, Path(where), *(bool(int(flag)) for flag in flags)))))
