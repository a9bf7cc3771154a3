"""Which end was the first, and what is said of it: no processes here."""

from __future__ import annotations

import signal
import socket

import pytest

from penstock.runtime.errors import DeadlineExceeded, PeerLost
from penstock.runtime.launch import child
from penstock.runtime.launch.failures import (
    FailureKind,
    FailureReport,
    RankExit,
    exit_code,
    explain,
    loss_of,
    ranks,
    root_cause,
)
from penstock.runtime.mesh.peers import LocalPeers

pytestmark = pytest.mark.unit


def report(rank: int, kind: FailureKind, at: float) -> FailureReport:
    return FailureReport(rank, kind, "ValueError", "what", ["  File x"], "all of it", at)


def end(rank: int, code: int, at: float, said: FailureReport | None = None, asked: bool = False) -> RankExit:
    return RankExit(rank, code, at, asked, said)


def test_nothing_failed() -> None:
    assert root_cause([end(0, 0, 1), end(1, 0, 2)]) is None


def test_an_exception_before_the_losses_it_caused_even_if_they_were_noticed_first() -> None:
    ends = [
        end(0, 1, 5, report(0, FailureKind.LOST, 4)),
        end(1, 1, 6, report(1, FailureKind.ERROR, 5)),
        end(2, 0, 1),
    ]
    root = root_cause(ends)
    assert root is ends[1]
    assert explain(root, ends).splitlines() == [
        "penstock: rank 1 failed: ValueError: what",
        "  File x",
        "  (PENSTOCK_TRACEBACK=1 shows the whole traceback)",
        "rank 0 ended because of it",
    ]
    assert exit_code(root) == 1


def test_a_kill_comes_before_the_exceptions_that_follow_it() -> None:
    ends = [end(0, 1, 5.2, report(0, FailureKind.ERROR, 5)), end(1, -9, 5.1), end(2, -15, 8, asked=True)]
    root = root_cause(ends)
    assert root is ends[1]
    text = explain(root, ends)
    assert text.startswith("penstock: rank 1 was killed by SIGKILL; out of memory is the usual cause")
    assert text.endswith("rank 0 ended because of it; rank 2 did not end and had to be stopped")
    assert exit_code(root) == 137


def test_a_kill_by_the_parent_is_no_cause() -> None:
    ends = [end(0, -9, 9, asked=True), end(1, 1, 5, report(1, FailureKind.LATE, 5))]
    assert root_cause(ends) is ends[1]


def test_a_silent_exit() -> None:
    ends = [end(0, 1, 5.1, report(0, FailureKind.LOST, 5)), end(1, 3, 4.9)]
    root = root_cause(ends)
    assert root is ends[1]
    assert explain(root, ends).startswith("penstock: rank 1 ended with exit code 3 and reported no exception")
    assert exit_code(root) == 3


def test_only_losses() -> None:
    ends = [end(0, 1, 5, report(0, FailureKind.LOST, 5)), end(1, 1, 4, report(1, FailureKind.LOST, 4))]
    assert root_cause(ends) is ends[1]


def test_an_interrupt_has_the_shells_code() -> None:
    assert exit_code(end(0, -signal.SIGINT, 5, report(0, FailureKind.INTERRUPT, 5))) == 130


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (PeerLost("x"), FailureKind.LOST),
        (DeadlineExceeded("x"), FailureKind.LATE),
        (ConnectionResetError("x"), FailureKind.LOST),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:61081. This"),
            FailureKind.LOST,
        ),
        (RuntimeError("Application timeout caused pair closure"), FailureKind.LOST),
        (
            RuntimeError("[unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"),
            FailureKind.LATE,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("Connection closed by peer"), None),
    ],
)
def test_losses_by_their_words(error: BaseException, loss: FailureKind | None) -> None:
    assert loss_of(error) is loss


class Unsayable(RuntimeError):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise KeyError("no text")


def test_regression_an_exception_that_has_no_text_was_not_reported() -> None:
    assert FailureReport.of(Unsayable(), 1).what == "Unsayable: (its text could not be made: KeyError)"
    caused = ValueError("it said this")
    caused.__cause__ = Unsayable()
    caused.__notes__ = [1]  # type: ignore[list-item]
    assert FailureReport.of(caused, 1).what == "ValueError: it said this\n1"


def test_a_loss_in_the_chain_makes_an_exception_secondary() -> None:
    error = ValueError("cannot clean up")
    error.__context__ = PeerLost("rank 0 is gone")
    assert FailureReport.of(error, 1).kind is FailureKind.LOST


def test_ranks_in_words() -> None:
    assert [ranks([3]), ranks([0, 1, 3]), ranks(range(63)), ranks([0, 1, 2, 4, 5])] == [
        "rank 3",
        "ranks 0, 1, 3",
        "ranks 0 to 62",
        "ranks 0, 1, 2, 4, 5",
    ]


def test_a_host_whose_name_stands_for_loopback_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two hosts of Debian ranks lost each other as they started, and nothing said why."""
    monkeypatch.setattr(socket, "gethostname", lambda: "host0")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert "host0, stands for 127.0.1.1" in child._advice()
    assert "set GLOO_SOCKET_IFNAME" in child._advice()
    with monkeypatch.context() as there:
        there.setenv("LOCAL_WORLD_SIZE", "2")
        assert child._advice() == "", "all ranks are on this host"
    with monkeypatch.context() as there:
        there.setenv("GLOO_SOCKET_IFNAME", "eth0")
        assert child._advice() == ""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.1")
    assert child._advice() == ""


def test_bug_an_error_without_a_text_left_the_processes_waiting_that_were_to_raise_with_it() -> None:
    def fail() -> None:
        raise Unsayable

    with pytest.raises(Unsayable):
        LocalPeers(1).together(fail, "say so")
