"""Runs a function in several gloo processes, one per rank, and tells how each ended.

    outcomes = run_ranks_to_end(4, cases.train, "zb-v")
    assert [o.value for o in outcomes] == ...

Processes are forked from a server that has torch loaded, and the first optimizer made, so that starting four takes a
fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver as servers
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from waiting import wait_until


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        code: its exit code; None where it had to be killed at the deadline.
        value: what the function returned; None where it raised.
        text: all it printed, and its error.
    """

    rank: int
    code: int | None
    value: Any
    text: str

    @property
    def last_line(self) -> str:
        lines = [line for line in self.text.splitlines() if line.strip()]
        return lines[-1] if lines else ""


_context: list[ForkServerContext] = []


def forkserver() -> ForkServerContext:
    """Starts processes that have loaded what `loaded` has."""
    if not _context:
        context = multiprocessing.get_context("forkserver")
        # One that a launch within this process has started ignores signals, and so would all that comes from it.
        servers._forkserver._stop()  # type: ignore[attr-defined]
        context.set_forkserver_preload(["loaded"])
        with pytest.MonkeyPatch.context() as there:  # the server finds modules by the environment alone
            there.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
            # What it starts answers Ctrl-C, though the tests may run in the background, where that is ignored.
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                servers.ensure_running()
            finally:
                signal.signal(signal.SIGINT, before)
        _context.append(context)
    return _context[0]


DEADLINE = 250.0
"""Seconds that ranks may take on a busy machine: less than a test may, which then says which of them stood still."""


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = DEADLINE,
    shares_gpu: bool = False,
    gpu_queues: int | None = None,
) -> list[Outcome]:
    """Runs `function(rank, *args)` on every rank inside a gloo group; what is left at the deadline is killed.

    Args:
        shares_gpu: NCCL carries what lies on the one GPU. It takes no two ranks of one host on one device, so each
            rank says that it is a host of its own (`NCCL_HOSTID`), and all goes over the loopback interface.
        gpu_queues: of work between each process and the GPU (`CUDA_DEVICE_MAX_CONNECTIONS`). Transport "nccl" needs
            one for each line. Where not given there are as many as CUDA makes by itself, 8: they take memory of the
            GPU, and many processes that start CUDA at once with 32 each find none left.
    """
    context = forkserver()
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(target=_child, args=(folder, rank, num_ranks, function, args, shares_gpu, gpu_queues))
            for rank in range(num_ranks)
        ]
        for child in children:
            child.start()
        try:
            _await(children, deadline)
            in_time = [not child.is_alive() for child in children]
        finally:
            for child in children:
                if child.is_alive():
                    child.kill()
                child.join()
        return [
            _outcome(Path(folder), rank, child.exitcode if ended else None)
            for rank, (child, ended) in enumerate(zip(children, in_time, strict=True))
        ]


def run_ranks_to_end(num_ranks: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
    """Runs it as `run_ranks` does. Fails the test, with the text of a rank, if one does not end with exit code 0."""
    outcomes = run_ranks(num_ranks, function, *args, **options)
    failed = [f"rank {o.rank} ended with {o.code}:\n{o.text[-3000:]}" for o in outcomes if o.code != 0]
    assert not failed, "\n".join(failed)
    return outcomes


def as_under_torchrun(rank: int, script: str) -> None:
    """Runs a script as torchrun starts it, without its loading torch anew: with the same variables, and a store that
    all ranks are clients of."""
    import torch.distributed as dist

    port: list[Any] = [None]
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    num_ranks = dist.get_world_size()
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0]),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    del store


def printed_by(script: Path, *words: str, deadline: float = DEADLINE) -> str:
    """What a script prints. It runs in a process that has loaded torch, and fails the test unless it ends well."""
    out, err = script.with_suffix(".out"), script.with_suffix(".err")
    process = forkserver().Process(target=_run_script, args=(script, words, out, err))
    process.start()
    process.join(deadline)
    process.kill()
    process.join()
    assert process.exitcode == 0, f"{script.name} ended with {process.exitcode}:\n{err.read_text()}"
    return out.read_text()


def _run_script(script: Path, words: tuple[str, ...], out: Path, err: Path) -> None:
    for path, number in ((out, 1), (err, 2)):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")


def appears(path: Path) -> None:
    """Returns when there is such a file: how one rank waits for a moment in another."""
    wait_until(path.exists, lambda: f"{path.name} is not there, but {sorted(os.listdir(path.parent))}", pause=0.01)


def _await(children: list[Any], deadline: float) -> None:
    end = time.monotonic() + deadline
    while any(child.is_alive() for child in children) and time.monotonic() < end:
        time.sleep(0.02)


def _outcome(folder: Path, rank: int, code: int | None) -> Outcome:
    value, text = folder / f"{rank}.value", folder / f"{rank}.text"
    return Outcome(
        rank,
        code,
        pickle.loads(value.read_bytes()) if value.exists() else None,
        text.read_text() if text.exists() else "",
    )


def _child(
    folder: str,
    rank: int,
    num_ranks: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    shares_gpu: bool,
    gpu_queues: int | None,
) -> None:
    with open(f"{folder}/{rank}.text", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if shares_gpu:  # before CUDA or NCCL have read the environment
        os.environ |= {
            "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }  # fmt: skip
    if gpu_queues is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(gpu_queues)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    code = 0
    try:
        backend = "cpu:gloo,cuda:nccl" if shares_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
        dist.all_reduce(torch.zeros(1))  # one that ended before another had connected to it would break its start
        value = function(rank, *args)
        Path(f"{folder}/{rank}.value").write_bytes(pickle.dumps(value))
        if dist.is_initialized():
            dist.destroy_process_group()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
