"""Several losses in several stages, and heads other than language models: the hints lead out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.formats.megatron_layout import MegatronLayout

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("layout", ["Et|t|LL|LL", "Et|t|tL|tL"])
def test_a_layout_with_several_losses_says_how_they_are_written(layout: str) -> None:
    with pytest.raises(ps.ScheduleError, match=r"write m for it, Ett\|ttmL") as refused:
        MegatronLayout.parse(layout)
    MegatronLayout.parse(str(refused.value).rpartition(" ")[2]).check_ranks(2)


def test_a_layout_with_m_in_several_stages_says_where_they_belong() -> None:
    with pytest.raises(ps.ScheduleError, match="every m is in one stage"):
        MegatronLayout.parse("Ett|ttm|mL")
    MegatronLayout.parse("Ett|tt|mmL").check_ranks(3)


class Early(nn.Module):
    """A stage with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.exit = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.layer(x))
        return hidden, nn.functional.cross_entropy(self.exit(hidden), labels, reduction="none")


class Last(nn.Module):
    """Passes on the loss that came."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, hidden: Tensor, early: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(hidden), early


def both(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """The losses of both stages."""
    return nn.functional.cross_entropy(output[0], labels) + 0.3 * output[1].mean()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_list_of_losses_is_refused_and_its_hint_trains_them(name: str) -> None:
    torch.manual_seed(0)
    stages, schedule = [Early(), Last()], ps.build(name, 2, 3)
    with pytest.raises(ps.RuntimeFailure, match="return it beside its output, and add the losses up in one function"):
        ps.Pipeline(stages, schedule, loss_fn=[nn.CrossEntropyLoss()] * 2)  # type: ignore[arg-type]
    x, labels = torch.randn(7, 8), torch.randint(4, (7,))
    loss = both(stages[1](*stages[0](x, labels)), labels)
    wanted = torch.autograd.grad(loss, [*stages[0].parameters(), *stages[1].parameters()])
    with ps.Pipeline(stages, schedule, loss_fn=both) as pipe:
        result = pipe.step((x, labels), labels, update=False)
        torch.testing.assert_close(torch.as_tensor(result.loss), loss.detach())
        for found, gradient in zip(pipe.parameters(), wanted, strict=True):
            torch.testing.assert_close(found.grad, gradient)


def test_what_split_says_of_a_vision_model_trains_it() -> None:
    transformers = pytest.importorskip("transformers")
    from hf_heads import VIT, batch_of, of
    from penstock.models.huggingface import Decoder

    model = of("ViTForImageClassification", **VIT, num_labels=3)
    batch = batch_of(model)
    with pytest.raises(ps.runtime.PartitionError, match=r"cut by penstock\.models\.huggingface\.Decoder\(model\)"):
        ps.split(model, 2)
    decoder = Decoder(model)
    with ps.Pipeline(decoder.stages(2), ps.build("1f1b", 2, 3), loss_fn=decoder.loss) as pipe:
        result = pipe.step(*decoder.inputs_and_targets(batch), update=False)
    torch.testing.assert_close(torch.as_tensor(result.loss), model(**batch).loss.detach())
    assert isinstance(model, transformers.PreTrainedModel)
