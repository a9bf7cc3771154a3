"""Inputs that are not cut along dimension 0: a rule for each, and errors that name the input and the rule."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

import penstock as ps

pytestmark = pytest.mark.unit

B, T, D = 6, 5, 8


class Rotary(nn.Module):
    """Takes mRoPE positions [3, B, T], a table of the whole batch, and a scale without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(11, D), nn.Embedding(20, D)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, table: Tensor | None = None, scale: Any = 1.0
    ) -> Tensor:
        x = self.embed(input_ids) + self.places(position_ids).mean(0) * scale
        return x if table is None else x + table.mean(0)


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Rotary(), nn.Linear(D, 3)]


class TokenLoss(nn.Module):
    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, targets)


def batch() -> tuple[dict[str, Any], Tensor]:
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (B, T), generator=made)
    positions = torch.randint(20, (3, B, T), generator=made)
    return {"input_ids": ids, "position_ids": positions}, torch.randn(B, T, 3, generator=made)


def plain_loop(
    model: list[nn.Module], parts: list[dict[str, Any]], targets: list[Tensor]
) -> tuple[Tensor, list[Any]]:
    """The loop that a user would write, cut by hand."""
    total = sum(len(target) for target in targets)
    losses = []
    for part, target in zip(parts, targets, strict=True):
        loss = TokenLoss()(model[1](model[0](**part)), target) * (len(target) / total)
        loss.backward()
        losses.append(loss.detach())
    found = losses[0]
    for loss in losses[1:]:
        found = found + loss
    return found, [p.grad for stage in model for p in stage.parameters()]


def trained(inputs: Any, targets: Any, **options: Any) -> tuple[Tensor, list[Any]]:
    model = stages()
    with ps.Pipeline(model, ps.build("1f1b", 2, 3), loss_fn=TokenLoss(), **options) as pipe:
        loss = pipe.step(inputs, targets, update=False).loss
        return loss, [p.grad for p in pipe.parameters()]


def same(one: tuple[Tensor, list[Any]], other: tuple[Tensor, list[Any]]) -> bool:
    return torch.equal(one[0], other[0]) and all(map(torch.equal, one[1], other[1]))


def test_mrope_positions_are_cut_along_their_dimension() -> None:
    inputs, targets = batch()
    parts = [
        {"input_ids": ids, "position_ids": places}
        for ids, places in zip(inputs["input_ids"].tensor_split(3), inputs["position_ids"].tensor_split(3, 1))
    ]
    want = plain_loop(stages(), parts, list(targets.tensor_split(3)))
    rules = ps.BatchRules(inputs={"position_ids": 1})
    assert same(trained(inputs, targets, batch=rules), want)
    table, scale = torch.randn(T, D), torch.tensor(0.5)  # without dimensions: whole without a rule
    rules = ps.BatchRules(inputs={"position_ids": -2, "table": ps.WHOLE})
    more = [{**part, "table": table, "scale": scale} for part in parts]
    want = plain_loop(stages(), more, list(targets.tensor_split(3)))
    assert same(trained({**inputs, "table": table, "scale": scale}, targets, batch=rules), want)


def test_the_error_names_each_input_its_shape_and_its_rule() -> None:
    inputs, targets = batch()
    said = (
        r"inputs\['input_ids'\] has shape \(6, 5\), 6 in dimension 0; inputs\['position_ids'\] has shape "
        r"\(3, 6, 5\), 3 in dimension 0.*batch=ps.BatchRules\(inputs=\{'position_ids': 1\}\)"
    )
    with pytest.raises(ps.RuntimeFailure, match=said):
        trained(inputs, targets)
    nested = {**inputs, "table": {"a": (torch.zeros(2, 6), torch.zeros(6))}}
    with pytest.raises(ps.RuntimeFailure, match=r"inputs=\{'table': \{'a': \{0: 1\}\}\}.*function"):
        trained(nested, targets, batch=ps.BatchRules(inputs={"position_ids": 1}))
    whole = {**inputs, "position_ids": inputs["position_ids"][:, :1]}
    with pytest.raises(ps.RuntimeFailure, match=r"inputs=\{'position_ids': ps.WHOLE\}"):
        trained(whole, targets)
    with pytest.raises(ps.RuntimeFailure, match=r"inputs\['position_ids'\] has shape \(3, 6, 5\), and its rule is 3"):
        trained(inputs, targets, batch=ps.BatchRules(inputs={"position_ids": 3}))


def test_functions_cut_what_no_dimension_does() -> None:
    """Offsets of the whole batch, and pictures of which samples have several."""
    offsets, per_sample = torch.tensor([0, 2, 5, 6]), [2, 3, 1]
    pictures = torch.randn(6, D)

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x: Tensor, cu_seqlens: Tensor, pictures: Tensor) -> Tensor:
            assert (int(cu_seqlens[0]), int(cu_seqlens[-1])) == (0, len(pictures))
            sums = [pictures[a:b].sum(0) for a, b in pairwise(cu_seqlens)]
            return self.layer(x) + torch.stack(sums)

    def cut_offsets(value: Tensor, num: int) -> list[Tensor]:
        return [part.cumsum(0) for part in ([*value.diff().tensor_split(num)])]

    torch.manual_seed(0)
    model: list[nn.Module] = [Packed(), nn.Linear(D, 3)]
    x, y = torch.randn(3, D), torch.randn(3, 3)

    def starts(value: Tensor, num: int) -> list[Tensor]:
        return [nn.functional.pad(part, (1, 0)) for part in cut_offsets(value, num)]

    rules = ps.BatchRules(inputs={"cu_seqlens": starts, "pictures": lambda value, num: value.split(per_sample)})
    given = {"x": x, "cu_seqlens": offsets, "pictures": pictures}
    with ps.Pipeline(copy.deepcopy(model), ps.build("1f1b", 2, 3), loss_fn=nn.MSELoss(), batch=rules) as pipe:
        loss = pipe.step(given, y, update=False).loss
    whole = nn.functional.mse_loss(model[1](model[0](**given)), y)
    torch.testing.assert_close(loss, whole.detach())
    for wrong, said in (
        (lambda value, num: [value], r"rule for inputs\['pictures'\] returned 1 entries for 3 microbatches"),
        (lambda value, num: value, r"rule for inputs\['pictures'\] returned a Tensor"),
    ):
        rules = ps.BatchRules(inputs={"cu_seqlens": starts, "pictures": wrong})
        pipe = ps.Pipeline(model, ps.build("1f1b", 2, 3), loss_fn=nn.MSELoss(), batch=rules)
        with pipe, pytest.raises(ps.RuntimeFailure, match=said):
            pipe.step(given, y)


def test_a_model_says_its_rules_and_what_is_given_comes_first() -> None:
    inputs, targets = batch()
    want = trained(inputs, targets, batch=ps.BatchRules(inputs={"position_ids": 1}))

    class Stages(list[nn.Module]):
        batch_rules: Any = ps.BatchRules(inputs={"position_ids": 1, "table": ps.WHOLE})

    def run(rules: Any, given: ps.BatchRules | None = None, more: Any = None) -> tuple[Tensor, list[Any]]:
        model = Stages(stages())
        model.batch_rules = rules
        with ps.Pipeline(model, ps.build("1f1b", 2, 3), loss_fn=TokenLoss(), batch=given) as pipe:
            return pipe.step({**inputs, **(more or {})}, targets, update=False).loss, [
                p.grad for p in pipe.parameters()
            ]

    assert same(run(Stages.batch_rules), want)
    assert same(
        run(lambda inputs: ps.BatchRules(inputs={"position_ids": len(inputs["position_ids"].shape) - 2})), want
    )
    assert same(
        run(ps.BatchRules(inputs={...: 0, "position_ids": 0}), ps.BatchRules(inputs={"position_ids": 1})), want
    )
    assert same(run(ps.BatchRules(inputs=0), ps.BatchRules(inputs={"position_ids": 1})), want)
    with pytest.raises(ps.RuntimeFailure, match=r"the model's attribute batch_rules is 1; give ps"):
        run(1)


@pytest.mark.parametrize("wrong", [True, "0", 1.0, {"x": None, "y": [1]}, {1.5: 0}])
def test_a_rule_of_another_type_is_refused(wrong: Any) -> None:
    with pytest.raises(ps.RuntimeFailure, match=r"a dimension, ps.WHOLE, a function|a name or a position"):
        ps.BatchRules(inputs=wrong)
    assert pickle.loads(pickle.dumps(ps.WHOLE)) is ps.WHOLE


def documents() -> tuple[Tensor, BlockMask]:
    doc = torch.randint(3, (4, 64), generator=torch.Generator().manual_seed(0)).sort(1).values

    def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (doc[b, q] == doc[b, kv]) & (q >= kv)

    return doc, create_block_mask(within, 4, None, 64, 64, device="cpu", BLOCK_SIZE=16)


class Attention(nn.Module):
    """By torch's own attention, as flex attention gives no gradients on a CPU."""

    is_flexible = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3 * D)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = self.layer(x)[:, None].chunk(3, -1)
        if self.is_flexible:
            return flex_attention(q, k, v, block_mask=mask)[:, 0]
        seen = create_mask(mask.mask_mod, mask.shape[0], 1, 64, 64, device="cpu")
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)[:, 0]


@pytest.mark.parametrize("first", ["x", "mask"])
def test_a_block_mask_is_cut_along_the_batch(first: str) -> None:
    doc, mask = documents()
    torch.manual_seed(0)
    model: list[nn.Module] = [Attention(), nn.Linear(D, 3)]
    x, y = torch.randn(4, 64, D), torch.randn(4, 64, 3)
    given = {"x": x, "mask": mask} if first == "x" else {"mask": mask, "x": x}
    pieces = mask.kv_num_blocks.tensor_split(3), mask.full_kv_indices.tensor_split(3)
    with ps.Pipeline(copy.deepcopy(model), ps.build("1f1b", 2, 3), loss_fn=nn.MSELoss()) as pipe:
        loss = pipe.step(given, y, update=False).loss
        for microbatch, blocks, indices in zip(pipe._local.cut(given, y, None, ()).inputs[0], *pieces, strict=True):
            assert torch.equal(microbatch["mask"].kv_num_blocks, blocks)
            assert torch.equal(microbatch["mask"].full_kv_indices, indices)
        with pytest.raises(ps.RuntimeFailure, match=r"inputs\['mask'\] has shape \(4, 1, 64, 64\)"):
            pipe.step({**given, "x": x[:3]}, y[:3])
        gradients = [p.grad for p in pipe.parameters()]
    want = plain_loop(model, by_hand(x, doc), list(y.tensor_split(3)))
    assert same((loss, gradients), want)


@pytest.mark.nightly
@pytest.mark.slow
def test_flex_attention_takes_the_mask_of_a_microbatch() -> None:
    doc, mask = documents()
    model: list[nn.Module] = [Attention(), nn.Linear(D, 3)]
    model[0].is_flexible = True
    x = torch.randn(4, 64, D)
    with ps.Pipeline(copy.deepcopy(model), ps.build("1f1b", 2, 3)) as pipe:
        found = pipe.predict({"x": x, "mask": mask})
    with torch.no_grad():
        assert all(map(torch.equal, found, [model[1](model[0](**part)) for part in by_hand(x, doc)]))


def by_hand(x: Tensor, doc: Tensor) -> list[dict[str, Any]]:
    parts = []
    for rows, seen in zip(x.tensor_split(3), doc.tensor_split(3), strict=True):

        def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, seen: Tensor = seen) -> Tensor:
            return (seen[b, q] == seen[b, kv]) & (q >= kv)

        mask = create_block_mask(within, len(rows), None, 64, 64, device="cpu", BLOCK_SIZE=16)
        parts.append({"x": rows, "mask": mask})
    return parts


def test_a_traced_model_attended_by_the_mask_of_its_example_alone() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.last = Attention(), nn.Linear(D, 3)

        def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
            return self.last(self.attention(x, mask))

    given = {"x": torch.randn(4, 64, D), "mask": documents()[1]}
    said = r"Whole takes a BlockMask, whose mask_mod a trace would freeze.*a list with one module for each stage"
    with pytest.raises(ps.runtime.PartitionError, match=said):
        ps.split(Whole(), 2, example=given)
    pipe = ps.Pipeline(Whole(), ps.build("1f1b", 2, 2), loss_fn=nn.MSELoss())
    with pipe, pytest.raises(ps.runtime.PartitionError, match=said):
        pipe.step(given, torch.zeros(4, 64, 3))


def test_a_block_mask_does_not_pass_between_stages() -> None:
    _, mask = documents()

    class Passes(nn.Module):
        def forward(self, x: Tensor, mask: BlockMask) -> Any:
            return {"x": x, "mask": mask}

    class Ends(nn.Module):
        def forward(self, x: Tensor, mask: BlockMask) -> Any:
            return x

    pipe = ps.Pipeline([Passes(), Ends()], ps.build("1f1b", 2, 2), loss_fn=nn.MSELoss())
    with pipe, pytest.raises(ps.RuntimeFailure, match=r"stage 0 returned a BlockMask.*document numbers"):
        pipe.evaluate({"x": torch.zeros(4, 64), "mask": mask}, torch.zeros(4, 64))
