"""What a split backward puts off is counted, and said where it is little; every rank has everyone's notices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime.execute.step_end import Notices
from penstock.runtime.split_backward import prepared
from penstock.runtime.split_backward.stage import HOOKED, HOOKED_MODULE, NO_RULE, TOO_SMALL, USED_OTHERWISE

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def from_hundred_multiply_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(prepared, "MERGE_WORK", 100)


def stepped(layers: list[nn.Module], num_ranks: int = 1, steps: int = 1) -> ps.Pipeline:
    schedule = ps.build("zb", num_ranks, 2)
    pipe = ps.Pipeline(nn.Sequential(*layers), schedule, loss_fn=nn.MSELoss())
    for _ in range(steps):
        pipe.step(torch.randn(20, 4), torch.randn(20, 4))
    return pipe


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.linear(x), self.linear.weight)


def test_all_that_waits_is_counted_in_multiply_adds() -> None:
    pipe = stepped([nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)], steps=2)
    (share,) = pipe.deferred_share().values()
    assert share.deferred == 20 * (4 * 8 + 8 * 4)
    assert (share.at_once, share.share, dict(share.reasons)) == (0, 1.0, {})
    assert pipe.notices == []


def test_what_does_not_wait_is_counted_with_its_reason() -> None:
    hooked, around = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
    hooked.weight.register_hook(lambda g: g)
    around.register_full_backward_hook(lambda *_: None)
    pipe = stepped([nn.Linear(4, 40), nn.Linear(40, 4), nn.Linear(4, 2), nn.Linear(2, 4), hooked, around, Both(),
                    nn.LayerNorm(4)])  # fmt: skip
    (share,) = pipe.deferred_share().values()
    assert share.deferred == 20 * (4 * 40 + 40 * 4)
    assert share.at_once == 20 * (4 * 2 + 2 * 4 + 3 * 4 * 4) + 20 * 8
    assert {why: len(names) for why, names in share.reasons.items()} == {
        TOO_SMALL: 4, HOOKED: 2, HOOKED_MODULE: 2, USED_OTHERWISE: 2, NO_RULE: 2,
    }  # fmt: skip
    assert pipe.notices == []


@pytest.mark.parametrize("other", ["zb", "1f1b"])
def test_bug_a_pipeline_did_not_split_any_more_once_another_one_of_the_same_model_was_closed(other: str) -> None:
    """Nor once one was made whose schedule does not split. The last one that splits puts the layers back."""
    layers: list[nn.Module] = [nn.Linear(4, 40), nn.Linear(40, 4)]
    pipe = stepped(layers)
    with ps.Pipeline(nn.Sequential(*layers), ps.build(other, 1, 2), loss_fn=nn.MSELoss()) as second:
        for each in (pipe, second, pipe):
            each.step(torch.randn(20, 4), torch.randn(20, 4))
            assert [share.share for share in each.deferred_share().values()] == [1.0] * (
                each is pipe or other == "zb"
            )
    pipe.step(torch.randn(20, 4), torch.randn(20, 4))
    assert [share.share for share in pipe.deferred_share().values()] == [1.0]
    pipe.close()
    assert not any("forward" in vars(layer) for layer in layers)


def test_a_stage_that_puts_little_off_says_so_once() -> None:
    pipe = stepped([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1), nn.Linear(1, 4))], 2, 3)
    (notice,) = pipe.notices
    assert notice.startswith("W has little to do")
    assert [share.share for share in pipe.deferred_share().values()] == [1.0, 0.0]


def test_a_stage_that_cannot_be_split_and_a_schedule_that_does_not_ask() -> None:
    pipe = stepped([nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4), nn.Bilinear(4, 4, 4)][:3], num_ranks=3)
    assert pipe.deferred_share()[2].share == 0
    assert "no linear, convolution or embedding" in next(iter(pipe.deferred_share()[2].reasons))
    plain = ps.Pipeline(nn.Sequential(nn.Linear(4, 4)), ps.build("1f1b", 1, 2), loss_fn=nn.MSELoss())
    plain.step(torch.randn(4, 4), torch.randn(4, 4))
    assert plain.deferred_share() == {}


def test_conv1d_of_gpt2_waits_in_a_pipeline() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, n_positions=16, vocab_size=11)
    block = transformers.models.gpt2.modeling_gpt2.GPT2Block(config, layer_idx=0)

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            y = self.block(x)
            return y[0] if isinstance(y, tuple) else y

    pipe = ps.Pipeline(nn.Sequential(Hidden()), ps.build("zb", 1, 2), loss_fn=nn.MSELoss())
    pipe.step(torch.randn(4, 6, 8), torch.randn(4, 6, 8))
    assert pipe.deferred_share()[0].share > 0.9


class Two:
    """Two ranks' notices, one after the other."""

    num_ranks, here = 2, (0,)

    def gather(self, value: list[str]) -> list[list[str]]:
        return [value, ["stage 1: so", "both"]]


def test_every_rank_has_everyones_notices_each_once() -> None:
    notices = Notices(Two())  # type: ignore[arg-type]
    notices.note(["stage 0: so", "both", "both"])
    assert (notices.num_new, notices.known()) == (2, ["stage 0: so", "both"])
    notices.share()
    notices.note(["both"])
    assert (notices.num_new, notices.known()) == (0, ["stage 0: so", "both", "stage 1: so"])
