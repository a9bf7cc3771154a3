"""Which of a host's addresses delegates use: those given, those in the environment, that which reaches others."""

from __future__ import annotations

import pytest

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.interfaces import local_addresses


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_INTERFACES", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def test_what_is_given_goes_before_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert local_addresses() == ("127.0.0.1",)
    monkeypatch.setenv("PENSTOCK_INTERFACES", "10.90.1.1,10.90.0.1")
    assert local_addresses() == ("10.90.1.1", "10.90.0.1")
    assert local_addresses(["lo", "127.0.0.2"]) == ("127.0.0.1", "127.0.0.2")


def test_the_address_that_reaches_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_addresses() == ("127.0.0.1",)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert local_addresses() == ("127.0.0.1",)


def test_an_interface_that_is_not_there() -> None:
    with pytest.raises(RuntimeFailure, match=r"interface 'wan7' has no address here .*this host has .*lo"):
        local_addresses(["wan7"])
