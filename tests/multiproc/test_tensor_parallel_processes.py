"""Tensor parallelism of stages: loss and every gradient against the whole stage in the same process.

Sums over ranks are grouped otherwise than in one matmul, so nothing is equal to the bit: 1e-5 relative, in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel_cases import CASES, KINDS
from parallel_runs import Distance, compare, drop, left_alone, refusals
from processes import run_ranks, run_ranks_to_end
from tiers import NIGHTLY

pytestmark = pytest.mark.multiproc

OF_FOUR = ("gpt", "gpt tied, split", "gpt of five words", "head", "embedding", "bert split", "middle")


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "names"), [(2, (*CASES, *KINDS)), (4, OF_FOUR if NIGHTLY else OF_FOUR[::2])])
def test_loss_and_gradients_are_those_of_the_whole_stage(num_ranks: int, names: tuple[str, ...]) -> None:
    outcomes = run_ranks_to_end(num_ranks, compare, names)
    for outcome in outcomes:
        found: dict[str, Distance] = outcome.value
        assert set(found) == set(names)
        far = {name: each for name, each in found.items() if max(each.loss, each.gradient) > 1e-5}
        assert not far
        assert all(each.sharded > 0 for each in found.values())
        assert all((each.deferred > 0) == ("split" in name) for name, each in found.items())


@pytest.mark.slow
def test_heads_drop_out_apart_and_all_else_alike() -> None:
    outcomes = run_ranks_to_end(2, drop)
    one, other = (o.value for o in outcomes)
    assert not torch.equal(one.heads, other.heads)
    assert torch.equal(one.output, other.output)
    assert torch.equal(one.output, one.again)
    assert torch.equal(one.after, other.after)
    # What stays whole has the same gradient on both, also where its draws were made again for the backward.
    for name in ("grads", "recomputed", "decoder"):
        pairs = zip(getattr(one, name), getattr(other, name), strict=True)
        assert all(torch.equal(mine, yours) for mine, yours in pairs), name
    assert all(torch.equal(now, again) for now, again in zip(one.grads, one.recomputed, strict=True))


@pytest.mark.slow
def test_a_rank_that_is_left_alone_says_so(tmp_path: Path) -> None:
    first = run_ranks(2, left_alone, tmp_path)[0]
    assert first.value is not None, first.text
    late, lost = first.value
    assert late.startswith("DeadlineExceeded: shard 0 of 2 waited for the others' parts of a sum")
    assert lost.startswith("PeerLost: shard 0 of 2 lost its connection")


def test_what_cannot_be_shared_or_looked_up_is_refused_on_every_rank() -> None:
    outcomes = run_ranks_to_end(2, refusals)
    for outcome in outcomes:
        above, below, target, heads, words, head, tied, mesh = outcome.value
        assert above.startswith("IndexError")
        assert below.startswith("IndexError")
        assert target.startswith("RuntimeError: index")
        assert "1 heads, which 2 tensor-parallel ranks cannot share" in heads
        assert "vocabulary of 1, smaller than the 2 ranks" in words
        assert "vocabulary of 1, smaller than the 2 ranks" in head
        assert "1.weight is also a parameter of another module" in tied
        assert "mesh of 2 dimensions" in mesh
