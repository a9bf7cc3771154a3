"""The inputs that transformers' models take: cut by the rules of their usual names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock as ps
from hf_families import batch_of, model_of
from penstock.models.huggingface import Decoder, packed_inputs
from penstock.models.huggingface.batch_rules import batch_rules
from penstock.runtime.stage.batch_rules import split

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]

LENGTHS = [5, 3, 4, 6]


def row() -> tuple[dict[str, Any], Tensor]:
    """What transformers' DataCollatorWithFlattening makes."""
    tokens = torch.randint(3, 290, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, 5, 8, 12, 18], dtype=torch.int32)
    labels = tokens.index_fill(1, offsets[:-1].long(), -100)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    more = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 6, "max_length_k": 6}
    return {"input_ids": tokens, "position_ids": positions, **more}, labels


def trained(decoder: Decoder, num: int, inputs: Any, labels: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    with ps.Pipeline(
        decoder.stages(2),
        ps.build("1f1b", 2, num),
        loss_fn=decoder.loss,
        parallel=ps.ParallelOptions(tied=decoder.tied),
    ) as pipe:
        loss = pipe.step(inputs, labels, update=False).loss
        return loss, {name: p.grad for name, p in pipe.named_parameters()}


def plain_loop(model: Any, parts: list[dict[str, Any]], labels: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    counts = [int((each[:, 1:] != -100).sum()) for each in labels]
    total = torch.zeros(())
    for part, target, count in zip(parts, labels, counts, strict=True):
        loss = model(**part, labels=target, use_cache=False).loss * (count / sum(counts))
        loss.backward()
        total = total + loss.detach()
    return total, {name: p.grad for name, p in model.named_parameters()}


def assert_same(found: tuple[Tensor, dict[str, Any]], want: tuple[Tensor, dict[str, Any]]) -> None:
    assert torch.equal(found[0], want[0])
    for name, gradient in found[1].items():
        assert gradient is want[1][name] or torch.equal(gradient, want[1][name]), name


@pytest.mark.parametrize("with_offsets", [True, False])
def test_a_packed_row_is_cut_between_its_sequences(with_offsets: bool) -> None:
    model = model_of("llama")
    inputs, labels = row()
    if not with_offsets:
        inputs = {name: inputs[name] for name in ("input_ids", "position_ids")}
    found = trained(Decoder(copy.deepcopy(model), compare=False), 3, inputs, labels)
    parts = [
        {name: inputs[name][:, a:b] for name in ("input_ids", "position_ids")} for a, b in ((0, 8), (8, 12), (12, 18))
    ]
    assert_same(found, plain_loop(model, parts, [labels[:, a:b] for a, b in ((0, 8), (8, 12), (12, 18))]))
    whole = model(**inputs, labels=labels, use_cache=False).loss
    torch.testing.assert_close(found[0], whole.detach())
    assert torch.equal(trained(Decoder(model, compare=False), 6, inputs, labels)[0].isfinite(), torch.tensor(True))


def test_offsets_are_counted_from_each_microbatch_s_first_token() -> None:
    inputs, _ = row()
    cut = split(inputs, 2, "inputs", batch_rules(inputs).inputs)
    assert [part["cu_seq_lens_q"].tolist() for part in cut] == [[0, 5, 8], [0, 4, 10]]
    assert [part["input_ids"].shape[1] for part in cut] == [8, 10]
    assert cut.sizes == [2.0, 2.0]
    rows = {"input_ids": torch.zeros(3, 4), "cu_seqlens": torch.tensor([0, 1, 4, 8, 10, 12])}
    cut = split(rows, 2, "inputs", batch_rules(rows).inputs)
    assert [part["cu_seqlens"].tolist() for part in cut] == [[0, 1, 4, 8], [0, 2, 4]]
    packed = packed_inputs(torch.arange(9)[None], torch.tensor([2, 3, 4]))
    cut = split(packed, 2, "inputs", batch_rules(packed).inputs)
    assert [part["attention_mask"].tolist() for part in cut] == [[[[[2, 3]]]], [[[[4]]]]]
    assert [part["position_ids"].tolist() for part in cut] == [[[0, 1, 0, 1, 2]], [[0, 1, 2, 3]]]


def test_what_holds_for_all_samples_is_whole_and_mrope_is_cut_along_its_samples() -> None:
    model = model_of("llama")
    batch = batch_of("llama")
    inputs, labels = {"input_ids": batch["input_ids"]}, batch["labels"]
    want = trained(Decoder(copy.deepcopy(model), compare=False), 3, inputs, labels)
    more = {"position_ids": torch.arange(11)[None], "cache_position": torch.arange(11)}
    assert_same(trained(Decoder(model, compare=False), 3, {**inputs, **more}, labels), want)
    mrope = {"input_ids": torch.zeros(6, 4), "position_ids": torch.arange(72).reshape(3, 6, 4)}
    assert batch_rules(mrope).inputs == {"position_ids": 1}
    for mask in (torch.ones(1, 1, 4, 4), torch.ones(1, 4)):
        assert batch_rules({"input_ids": torch.zeros(6, 4), "attention_mask": mask}).inputs == {
            "attention_mask": ps.WHOLE
        }
    padded = {"input_ids": torch.zeros(1, 4), "position_ids": torch.tensor([[0, 0, 0, 1]])}
    padded["attention_mask"] = torch.tensor([[0, 0, 1, 1]])
    assert batch_rules(padded).inputs == {}
    assert batch_rules(torch.zeros(6, 4)) == batch_rules([mrope]) == ps.BatchRules()


@pytest.mark.slow
def test_each_sample_s_pictures_go_with_it() -> None:
    model = model_of("llava")
    decoder = Decoder(copy.deepcopy(model))
    batch = batch_of("llava")
    assert decoder.pictures is not None
    token, num = decoder.pictures.token, decoder.pictures.num_tokens
    ids = batch["input_ids"].masked_fill(batch["input_ids"] == token, 5)
    counts = [0, 0, 1, 2, 0, 1]
    for sample, count in enumerate(counts):
        ids[sample, : count * num] = token
    inputs: dict[str, Any] = {"input_ids": ids, "pixel_values": batch["pixel_values"][:4]}
    found = trained(decoder, 3, inputs, batch["labels"])
    pictures = [None, *batch["pixel_values"][:4].split([3, 1])]
    parts: list[dict[str, Any]] = [
        {"input_ids": each, "pixel_values": seen} for each, seen in zip(ids.split(2), pictures, strict=True)
    ]
    assert_same(found, plain_loop(model, parts, list(batch["labels"].split(2))))
    with pytest.raises(ps.RuntimeFailure, match=r"inputs\['pixel_values'\] has shape \(3, 3, 8, 8\)"):
        trained(decoder, 3, {**inputs, "pixel_values": batch["pixel_values"][:3]}, batch["labels"])
