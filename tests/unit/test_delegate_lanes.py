"""How many delegates a link wants, how links stand by what delegates tell, and what a delegate process loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.control.events import LinkDown, LinkUp
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.transport.delegate import Counters, LaneCount, lanes_for
from penstock.runtime.transport.delegate import __file__ as package
from penstock.runtime.transport.delegate.carrier.descriptor import CloseReason, Descriptor, DescriptorKind, Lane
from penstock.runtime.transport.delegate.health import ConnectionHealth

pytestmark = pytest.mark.unit


def test_lanes_keep_up_with_what_is_produced() -> None:
    assert lanes_for(8, 0, 0.5).lanes == 4  # PipeMorph's example: 8 a second, 2 a second each
    assert lanes_for(8, 0.3, 0) == LaneCount(1, 6)
    assert lanes_for(30, 0, 0.1).lanes == 3  # 0.1 * 30 is a little above 3 in floats
    assert lanes_for(0, 5, 5) == LaneCount(1, 1)
    assert lanes_for(1000, 0, 1, most=6).lanes == 6


@given(st.floats(0, 1e4), st.floats(0, 10), st.floats(0, 10))
def test_enough_lanes_and_places_for_any_rate(rate: float, delay: float, busy: float) -> None:
    lanes, posted = lanes_for(rate, delay, busy, most=10**6)
    assert lanes >= 1
    assert lanes >= rate * busy - 1e-6
    assert posted >= 2 * delay * rate + 1 - 1e-6
    assert posted <= 2 * delay * rate + 2


@pytest.mark.parametrize("given", [(-1, 0, 0), (1, float("nan"), 0), (1, 0, float("inf"))])
def test_rates_that_make_no_sense(given: tuple[float, float, float]) -> None:
    with pytest.raises(RuntimeFailure, match="at least 0"):
        lanes_for(*given)
    with pytest.raises(RuntimeFailure, match="at least 1"):
        lanes_for(1, 1, 1, most=0)


def health() -> tuple[ConnectionHealth, Counters]:
    counters = Counters()
    addresses = {0: ["10.0.0.1", "10.1.0.1"], 1: ["10.0.0.2", "10.1.0.2"]}
    return ConnectionHealth(0, addresses.__getitem__, counters), counters


OUT, IN = Lane(0, 1, 0, 0), Lane(1, 0, 1, 0)


def test_going_over_to_another_interface_and_back_is_counted_and_told_once_a_link() -> None:
    found, counters = health()
    for lane in (OUT, OUT._replace(place=1)):
        found.learn(Descriptor(DescriptorKind.CONNECTED, lane, 0, 0, 0))
    for lane in (OUT, OUT._replace(place=1)):
        found.learn(Descriptor(DescriptorKind.CUT, lane, CloseReason.INTERFACE_DOWN, 0, 0))
        found.learn(Descriptor(DescriptorKind.CONNECTED, lane, 2, 1, 1))
    assert found.events == [LinkDown((0, 1))]
    assert (counters.failovers, counters.failbacks, counters.resent) == (2, 0, 4)
    found.learn(Descriptor(DescriptorKind.CUT, OUT, CloseReason.BETTER_PATH, 1, 1))
    found.learn(Descriptor(DescriptorKind.CONNECTED, OUT, 0, 0, 0))
    assert found.events == [LinkDown((0, 1)), LinkUp((0, 1))]
    assert (counters.failovers, counters.failbacks, counters.reconnects) == (2, 1, 0)


def test_a_killed_delegate_at_the_other_end_is_no_dead_link() -> None:
    found, counters = health()
    found.learn(Descriptor(DescriptorKind.CONNECTED, OUT, 0, 0, 0))
    found.learn(Descriptor(DescriptorKind.CUT, OUT, CloseReason.CLOSED, 0, 0))
    assert "no connection 0->1 forward 0 (last over 10.0.0.1 -> 10.0.0.2): the other end closed it" in found.words()
    found.learn(Descriptor(DescriptorKind.CONNECTED, OUT, 1, 0, 0))
    assert (found.events, found.words()) == ([], "")
    assert (counters.reconnects, counters.failovers, counters.resent) == (1, 0, 1)


def test_who_is_gone_and_who_stands_still() -> None:
    found, _ = health()
    found.learn(Descriptor(DescriptorKind.CONNECTED, IN, 0, 1))
    found.learn(Descriptor(DescriptorKind.SILENT, IN))
    assert "rank 1's delegate is connected and says nothing" in found.words()
    found.learn(Descriptor(DescriptorKind.HEARD, IN))
    assert found.words() == ""
    assert found.gone() == set()
    found.learn(Descriptor(DescriptorKind.REFUSED, IN, CloseReason.REFUSED))
    assert found.gone() == {1}
    found.learn(Descriptor(DescriptorKind.CONNECTED, IN, 0, 1))
    assert found.gone() == set()


def test_a_delegate_loads_neither_torch_nor_numpy_nor_penstock() -> None:
    folder = str(Path(package).parent)
    code = (
        f"import sys; sys.path.insert(0, {folder!r}); import carrier.delegate, carrier.outgoing, carrier.incoming; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert "carrier" in loaded
    assert loaded - {"carrier", "__main__"} <= set(sys.stdlib_module_names) | {"__mp_main__"}
    assert not loaded & {"torch", "numpy", "penstock", "asyncio", "ctypes"}
