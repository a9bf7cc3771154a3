"""Stores: queues in this process, in another one and in Redis; what happens when a server stops, dies and refuses."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from penstock.runtime import RuntimeFailure
from penstock.runtime.adapt.store import RedisStore, Rendezvous, Store, StoreLost, TorchStore
from penstock.train.checks import SettingsError
from penstock.train.settings import Settings
from processes import forkserver
from stores import Server, free_port, running
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.unit


def shared(store: Store) -> Rendezvous:
    return Rendezvous(store, "test", 0, (0,))


@pytest.fixture(params=["memory", "tcp", "redis"])
def stores(request: pytest.FixtureRequest) -> Iterator[tuple[Store, Store]]:
    """A store as two processes have it."""
    if request.param == "memory":
        yield (TorchStore(dist.HashStore()),) * 2
    elif request.param == "tcp":
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield TorchStore(served), TorchStore(dist.TCPStore("127.0.0.1", served.port))
    else:
        with running() as server:
            yield RedisStore(server.address), RedisStore(server.address)


@pytest.mark.slow
def test_what_is_pushed_is_popped_once_and_in_order(stores: tuple[Store, Store]) -> None:
    store, other = stores
    values = [b"", b"\x00\xff\n", "größer".encode(), b"x" * 200_000]
    for value in values:
        other.push("a", value)
    other.push("b", b"elsewhere")
    assert [store.pop("a") for _ in values] == values
    assert store.pop("a") is None
    assert store.pop("b") == b"elsewhere"
    store.close()
    other.close()


def test_a_pop_waits_for_what_comes(stores: tuple[Store, Store]) -> None:
    store, other = stores
    late = threading.Timer(0.2, other.push, ["late", b"there"])
    late.start()
    assert shared(store).pop("late", PATIENCE) == b"there"
    assert shared(store).pop("late", 0.02) is None
    late.join()


def test_the_jobs_own_store_that_died_is_lost() -> None:
    """Not by an error of torch's."""
    process = forkserver().Process(target=serve_torch, args=(port := free_port(),))
    process.start()
    store = TorchStore(dist.TCPStore("127.0.0.1", port))
    store.push("a", b"1")
    process.kill()
    process.join()
    with pytest.raises(StoreLost, match="own store cannot be reached"):
        push_for_long(store)


def serve_torch(port: int) -> None:
    _store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    time.sleep(1000)


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as server:
        yield server


def push_for_long(store: Store) -> None:
    """What is written before it comes out that the server died is taken by the system."""
    wait_until(lambda: store.push("a", b"2"), lambda: "what is pushed is taken, though the server is dead")


def test_a_server_that_died_is_found_again(server: Server) -> None:
    store = RedisStore(server.address)
    store.push("a", b"1")
    server.kill()
    with pytest.raises(StoreLost, match=str(server.port)):
        push_for_long(store)
    with pytest.raises(StoreLost, match=f"{server.port}"):
        store.pop("a")
    server.start()
    store.push("a", b"3")
    assert store.pop("a") == b"3"
    store.close()


@pytest.mark.slow
def test_a_server_that_stands_still_loses_nothing(server: Server) -> None:
    store = shared(RedisStore(server.address))
    assert store.push("a", b"1")
    server.signal(signal.SIGSTOP)
    threading.Timer(1.0, server.signal, [signal.SIGCONT]).start()
    assert store.push("a", b"2")
    assert [store.pop("a", PATIENCE), store.pop("a", PATIENCE)] == [b"1", b"2"]
    assert store.silent() == 0
    store.close()


def test_it_is_known_for_how_long_there_was_no_answer(server: Server) -> None:
    store = shared(RedisStore(server.address))
    server.kill()
    wait_until(lambda: not store.push("a", b"1"), lambda: "what is pushed is taken, though the server is dead")
    silent = store.silent()
    assert silent > 0
    assert not store.push("a", b"1")
    assert store.silent() > silent
    assert str(server.port) in store.error
    server.start()
    wait_until(lambda: store.push("a", b"1"), lambda: store.error)
    assert store.silent() == 0
    store.close()


def test_nobody_there() -> None:
    port = free_port()
    with pytest.raises(StoreLost, match=f"127.0.0.1:{port}.*cannot be"):
        RedisStore(f"redis://127.0.0.1:{port}")


def test_a_redis_that_wants_a_password() -> None:
    with running(password="let me in") as server:
        with pytest.raises(StoreLost, match=r"cannot be used.*[Aa]uthentication"):
            RedisStore(server.address)
        with pytest.raises(StoreLost, match="password") as refused:
            RedisStore(f"redis://:wrong@127.0.0.1:{server.port}/0")
        assert "wrong" not in str(refused.value)
        RedisStore(f"redis://:let%20me%20in@127.0.0.1:{server.port}/0").close()


def test_a_password_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(password="let me in") as server:
        monkeypatch.setenv("PENSTOCK_STORE_PASSWORD", "let me in")
        RedisStore(server.address).close()
        with pytest.raises(StoreLost, match="password"):  # what the address says goes first
            RedisStore(f"redis://:wrong@127.0.0.1:{server.port}/0")


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
    ],
)
def test_no_error_shows_a_password(address: str) -> None:
    def as_settings(text: str) -> object:
        return Settings(adapt=True, store=text)

    def without_adapt(text: str) -> object:
        return Settings(store=text)

    said = []
    for give in (RedisStore, as_settings, without_adapt):
        try:
            give(address)
        except (RuntimeFailure, SettingsError) as error:
            said.append(f"{error!r} {error.__cause__!r}")
    assert said
    assert not any(piece in text for text in said for piece in ("secret", "sec", "ret@"))


@pytest.mark.parametrize("address", ["memcached://a:1", "tcp://a:1", "redis://a:b/c"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(RuntimeFailure, match=address.partition(":")[0]):
        RedisStore(address)
