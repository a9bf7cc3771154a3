"""Which end was the first, and what is said of it: no processes here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from penstock.runtime.errors import DeadlineExceeded, PeerLost
from penstock.runtime.launch import rank
from penstock.runtime.launch.launcher import LaunchedRank, root_cause
from penstock.runtime.launch.rank import FailureReport, is_loss
from penstock.runtime.mesh.collective import is_late
from penstock.runtime.mesh.peers import LocalPeers

pytestmark = pytest.mark.unit


def report(at: float, is_secondary: bool = False) -> FailureReport:
    return FailureReport("what it said", is_secondary, at)


def test_nothing_failed() -> None:
    assert root_cause([LaunchedRank(0, 0, 1), LaunchedRank(1, 0, 2)]) is None


def test_an_exception_before_the_losses_it_caused_even_if_they_were_noticed_first() -> None:
    ends = [
        LaunchedRank(0, 1, 5, report=report(4, is_secondary=True)),
        LaunchedRank(1, 1, 6, report=report(5)),
        LaunchedRank(2, 0, 1),
    ]
    root = root_cause(ends)
    assert root is ends[1]
    assert root.verdict() == (1, "what it said")


def test_a_kill_comes_before_the_exceptions_that_follow_it() -> None:
    ends = [
        LaunchedRank(0, 1, 5.2, report=report(5)),
        LaunchedRank(1, -9, 5.1),
        LaunchedRank(2, -15, 8, asked=True),
    ]
    root = root_cause(ends)
    assert root is ends[1]
    code, said = root.verdict()
    assert code == 137
    assert said.startswith("rank 1 was killed by SIGKILL; out of memory is the usual cause")


def test_a_kill_by_the_parent_is_no_cause() -> None:
    ends = [LaunchedRank(0, -9, 9, asked=True), LaunchedRank(1, 1, 5, report=report(5))]
    assert root_cause(ends) is ends[1]


def test_a_silent_exit() -> None:
    ends = [LaunchedRank(0, 1, 5.1, report=report(5, is_secondary=True)), LaunchedRank(1, 3, 4.9)]
    root = root_cause(ends)
    assert root is ends[1]
    assert root.verdict() == (3, "rank 1 ended with exit code 3 and reported no exception")


def test_only_losses() -> None:
    ends = [LaunchedRank(number, 1, 5, report=report(5 - number, is_secondary=True)) for number in (0, 1)]
    assert root_cause(ends) is ends[1]


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (PeerLost("x"), "lost"),
        (DeadlineExceeded("x"), None),
        (ConnectionResetError("x"), "lost"),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:61081. This"),
            "lost",
        ),
        (RuntimeError("Application timeout caused pair closure"), "lost"),
        (
            RuntimeError("[unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"),
            "late",
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("Connection closed by peer"), None),
    ],
)
def test_losses_by_their_words(error: BaseException, loss: str | None) -> None:
    assert is_loss(error) == (loss == "lost")
    assert (isinstance(error, RuntimeError) and is_late(error) and not is_loss(error)) == (loss == "late")


class Unsayable(RuntimeError):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise KeyError("no text")


def test_regression_an_exception_that_has_no_text_was_not_reported() -> None:
    said = FailureReport.of(Unsayable(), 1).text
    assert said.startswith("rank 1 failed: Unsayable: (its text could not be made: KeyError)")
    caused = ValueError("it said this")
    caused.__cause__ = Unsayable()
    caused.__notes__ = [1]  # type: ignore[list-item]
    assert FailureReport.of(caused, 1).text.startswith("rank 1 failed: ValueError: it said this\n1\n")


def test_a_loss_in_the_chain_makes_an_exception_secondary() -> None:
    error = ValueError("cannot clean up")
    error.__context__ = PeerLost("rank 0 is gone")
    assert FailureReport.of(error, 1).is_secondary


def test_a_host_whose_name_stands_for_loopback_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two hosts of Debian ranks lost each other as they started, and nothing said why."""
    monkeypatch.setattr(socket, "gethostname", lambda: "host0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert "as host0" in rank._advice()
    assert "set GLOO_SOCKET_IFNAME" in rank._advice()
    with monkeypatch.context() as there:
        there.setenv("LOCAL_WORLD_SIZE", "2")
        assert rank._advice() == "", "all ranks are on this host"
    with monkeypatch.context() as there:
        there.setenv("GLOO_SOCKET_IFNAME", "eth0")
        assert rank._advice() == ""


def test_bug_an_error_without_a_text_left_the_processes_waiting_that_were_to_raise_with_it() -> None:
    def fail() -> None:
        raise Unsayable

    with pytest.raises(Unsayable):
        LocalPeers(1).together(fail, "say so")


def test_a_rank_that_is_to_end_keeps_the_processes_that_it_started() -> None:
    """SIGTERM killed the workers of its DataLoader, so that it could not end its step and save."""
    shell = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", shell], start_new_session=True, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        one = LaunchedRank(0, process=process)
        try:
            one.send(signal.SIGTERM)
            process.wait()
            assert one.asked
            time.sleep(0.2)
            assert "State:\tS" in Path(f"/proc/{child}/status").read_text(), "it no longer sleeps"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
