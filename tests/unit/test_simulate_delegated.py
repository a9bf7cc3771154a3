"""Links whose messages go through delegates, beside links that block."""

import pytest

import penstock as ps
from in_python import in_python
from penstock.simulation.simulator import simulate

COSTS = ps.Costs.uniform(4, f=10, i=10, w=10)
LATE = ps.Links({(0, 1): 20.0})
ZB = ps.build("zb", num_ranks=4, num_microbatches=12)

pytestmark = pytest.mark.unit


def makespan(transport: ps.Blocking | str, links: ps.Links = LATE) -> float:
    return simulate(ZB, COSTS, links=links, transport=transport).makespan


@pytest.mark.parametrize("link", [(0, 1), (1, 0)])
def test_the_delegated_link_does_not_block(link: tuple[int, int]) -> None:
    assert makespan(ps.Blocking(1)) == 480.0
    assert makespan(ps.Blocking(1, frozenset({link}))) == makespan("decoupled") == 440.0


def test_other_links_block_as_before() -> None:
    assert makespan(ps.Blocking(1, frozenset({(2, 3)}))) == makespan(ps.Blocking(1))
    both = ps.Links({(0, 1): 30.0, (2, 3): 30.0})
    delegated = [frozenset({(0, 1), (2, 3)}), frozenset({(0, 1)}), frozenset({(2, 3)}), frozenset()]
    assert [makespan(ps.Blocking(1, links), both) for links in delegated] == [600.0, 620.0, 630.0, 630.0]


def test_c_and_python_agree() -> None:
    both = ps.Links({(0, 1): 30.0, (2, 3): 30.0})
    transport = ps.Blocking(1, frozenset({(0, 1)}))
    with in_python():
        expected = makespan(transport, both)
    assert makespan(transport, both) == expected
