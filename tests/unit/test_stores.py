"""Stores: queues in this process, in another one and in Redis; what happens when a server stops, dies and refuses."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from penstock.runtime import RuntimeFailure
from penstock.runtime.adapt.store import InProcessStore, Store, StoreClient, StoreLost, open_store
from penstock.train.checks import SettingsError
from penstock.train.settings import Settings
from stores import Server, free_port, running
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.unit


@pytest.fixture(params=["memory", "tcp", "redis"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "memory":
        yield InProcessStore()
        return
    with running(request.param) as server:
        opened = open_store(server.address)
        yield opened
        opened.close()


@pytest.mark.slow
def test_what_is_pushed_is_popped_once_and_in_order(store: Store) -> None:
    other = store.another()
    values = [b"", b"\x00\xff\n", "größer".encode(), b"x" * 200_000]
    for value in values:
        other.push("a", value)
    other.push("b", b"elsewhere")
    assert [store.pop("a", PATIENCE) for _ in values] == values
    assert store.pop("a", 0.02) is None
    assert store.pop("b", PATIENCE) == b"elsewhere"
    other.close()


def test_a_pop_waits_for_what_comes(store: Store) -> None:
    other = threading.Timer(0.2, lambda: store.another().push("late", b"there"))
    other.start()
    assert store.pop("late", PATIENCE) == b"there"
    other.join()


@pytest.fixture(params=["tcp", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(request.param) as server:
        yield server


def push_for_long(store: Store) -> None:
    """What is written before it comes out that the server died is taken by the system."""
    wait_until(lambda: store.push("a", b"2"), lambda: "what is pushed is taken, though the server is dead")


def test_a_server_that_died_is_found_again(server: Server) -> None:
    store = open_store(server.address)
    store.push("a", b"1")
    server.kill()
    with pytest.raises(StoreLost, match=str(server.port)):
        push_for_long(store)
    with pytest.raises(StoreLost, match=f"{server.port}"):
        store.pop("a", 0.1)
    server.start()
    store.push("a", b"3")
    assert store.pop("a", PATIENCE) == b"3"
    store.close()


@pytest.mark.slow
def test_a_server_that_stands_still_loses_nothing(server: Server) -> None:
    line = StoreClient(open_store(server.address))
    assert line.push("a", b"1")
    server.signal(signal.SIGSTOP)
    threading.Timer(1.0, server.signal, [signal.SIGCONT]).start()
    assert line.push("a", b"2")
    assert [line.pop("a", PATIENCE), line.pop("a", PATIENCE)] == [b"1", b"2"]
    assert line.silent() == 0
    line.close()


def test_a_line_knows_how_long_it_has_had_no_answer(server: Server) -> None:
    line = StoreClient(open_store(server.address))
    server.kill()
    wait_until(lambda: not line.push("a", b"1"), lambda: "what is pushed is taken, though the server is dead")
    silent = line.silent()
    assert silent > 0
    assert not line.push("a", b"1")
    assert line.silent() > silent
    assert str(server.port) in line.error
    server.start()
    wait_until(lambda: line.push("a", b"1"), lambda: line.error)
    assert line.silent() == 0
    line.close()


def test_nobody_there() -> None:
    port = free_port()
    for kind in ("tcp", "redis"):
        with pytest.raises(StoreLost, match=f"127.0.0.1:{port}.*cannot be"):
            open_store(f"{kind}://127.0.0.1:{port}")


def test_a_redis_that_wants_a_password() -> None:
    with running("redis", password="let me in") as server:
        with pytest.raises(StoreLost, match=r"cannot be used.*[Aa]uthentication"):
            open_store(server.address)
        with pytest.raises(StoreLost, match="password") as refused:
            open_store(f"redis://:wrong@127.0.0.1:{server.port}/0")
        assert "wrong" not in str(refused.value)
        open_store(f"redis://:let%20me%20in@127.0.0.1:{server.port}/0").close()


def test_a_password_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with running("redis", password="let me in") as server:
        monkeypatch.setenv("PENSTOCK_STORE_PASSWORD", "let me in")
        open_store(server.address).close()
        with pytest.raises(StoreLost, match="password"):  # what the address says goes first
            open_store(f"redis://:wrong@127.0.0.1:{server.port}/0")


@pytest.mark.parametrize(
    "address",
    [
        "redis://me:secret@a:b/c",
        "redis://:sec#ret@a:1",
        "redis://:sec/ret@a:1",
        "redis://:sec:ret@a:port",
        "rediss://me:secret@[a:1",
        "memcached://me:secret@a:1",
        "redis:me:secret@a:1",
        "tcp://me:secret@a",
    ],
)
def test_no_error_shows_a_password(address: str) -> None:
    def as_settings(text: str) -> object:
        return Settings(adapt=True, store=text)

    def without_adapt(text: str) -> object:
        return Settings(store=text)

    said = []
    for give in (open_store, as_settings, without_adapt):
        try:
            give(address)
        except (RuntimeFailure, SettingsError) as error:
            said.append(f"{error!r} {error.__cause__!r}")
    assert said
    assert not any(piece in text for text in said for piece in ("secret", "sec", "ret@"))


@pytest.mark.parametrize("address", ["memcached://a:1", "tcp://a", "tcp://a:99999", "redis://a:b/c", "tcp://a:1/2"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(RuntimeFailure, match=address.partition(":")[0]):
        open_store(address)


def test_redis_without_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(RuntimeFailure, match=r"pip install 'penstock\[redis\]'"):
        open_store("redis://127.0.0.1:1")
