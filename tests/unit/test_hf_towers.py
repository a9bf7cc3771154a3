"""Towers for images in stages: cut anywhere, to the bit what the whole model learns, and what stays in one piece."""

from __future__ import annotations

import copy
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock as ps
from hf_families import FAMILIES, batch_of, config_of, model_of, plain_step
from penstock.cli import main
from penstock.models.huggingface import Decoder
from penstock.models.huggingface.layers import HIDDEN, SELECTED, TOKENS, MergeLayer, TowerBlockLayer
from penstock.runtime.tensors.pytree import flatten
from penstock.train.settings import Settings
from penstock.train.tasks.huggingface import DecoderTask
from tiers import others_nightly
from train_runs import losses

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'penstock[hf]'")

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]

TOWERS = ("llava", "paligemma")


def test_every_block_of_a_tower_is_a_layer() -> None:
    decoder = Decoder(config_of("llava"))
    tower = decoder.anatomy.tower
    assert tower is not None
    assert decoder.num_layers == 1 + 3 + 1 + 4 + 1
    assert tower.before == ("model.vision_tower.embeddings", "model.vision_tower.pre_layrnorm")
    assert (tower.selected, tower.num_called) == ((1,), 2), "the last block but one is looked at, and the last is not"
    assert (tower.num_positions, tower.width) == (5, 16)
    assert not decoder.has_encoder
    names = [{name for name, _ in layer.named_parameters()} for layer in decoder.layers()]
    assert all("vision_tower.encoder.layers.1." in name for name in names[2])
    assert {name.partition(".")[2].partition(".")[0] for name in names[4]} == {
        "vision_tower",
        "multi_modal_projector",
        "language_model",
    }
    assert sum(map(len, names)) == len(dict(decoder.model.named_parameters()))
    costs = decoder.costs()
    assert costs[1] == costs[2] > costs[3] == 1.0, "a block that is not called costs nothing"


def test_tokens_go_along_with_what_the_tower_sees() -> None:
    decoder = Decoder(model_of("llava", vision_feature_layer=[1, 2, -1]))
    batch = batch_of("llava")
    value: Any = decoder.inputs_and_targets(batch)[0]
    seen = []
    for layer in decoder.layers(range(decoder.anatomy.first_block)):
        value = layer(value)
        seen.append((set(value), len(value.get(SELECTED, ()))))
    along = {TOKENS, "attention_mask", HIDDEN}
    assert seen == [(along, 0), (along, 0), ({*along, SELECTED}, 1), ({*along, SELECTED}, 2), (along - {TOKENS}, 0)]
    assert value[HIDDEN].shape == (6, 11, 16)


def _step(model: Any, batch: dict[str, Tensor], schedule: str, cut: list[int]) -> None:
    """Compares a step of stages with the whole model's."""
    decoder = Decoder(copy.deepcopy(model), compare=False)
    assert decoder.anatomy.tower is not None
    split = schedule == "zb-v"
    order, num = (ps.build("zb-v", 2, 6), 6) if split else (ps.build(schedule, 4, 3), 3)
    pipe = ps.Pipeline(
        decoder.stages(4, [*cut, decoder.num_layers - sum(cut)]),
        order,
        loss_fn=decoder.loss,
        parallel=ps.ParallelOptions(tied=decoder.tied),
    )
    result = pipe.step(*decoder.inputs_and_targets(batch), update=False)
    loss, gradients = plain_step(model, batch, num, decoder.loss)
    assert torch.equal(torch.as_tensor(result.loss), loss)
    found = {key: parameter.grad for key, parameter in pipe.named_parameters()}
    names = {id(parameter): key for key, parameter in model.named_parameters(remove_duplicate=False) if key in found}
    assert names.keys() == {id(parameter) for parameter in model.parameters()}
    for key, gradient in found.items():
        wanted = gradients[key]
        if gradient is None or wanted is None:
            assert not any(each.any() for each in (gradient, wanted) if each is not None), key
        else:
            assert torch.equal(gradient, wanted), key


CUTS = ([2, 1, 1], [1, 2, 2], [3, 1, 1], [1, 1, 4])
"""Layers of the first three stages, of 1 + 3 of a tower, what merges, 4 blocks and the head."""


@pytest.mark.parametrize(
    ("name", "cut"), others_nightly(product(TOWERS, CUTS), list(zip(TOWERS * 2, CUTS, strict=True))), ids=str
)
def test_a_cut_inside_a_tower_changes_no_bit(name: str, cut: list[int]) -> None:
    for schedule in ("1f1b", "zb-v"):
        _step(model_of(name), batch_of(name), schedule, cut)


@pytest.mark.parametrize("name", TOWERS)
def test_text_alone_passes_a_tower_by(name: str) -> None:
    batch = batch_of(name)
    del batch["pixel_values"]
    batch["input_ids"][batch["input_ids"] == 299] = 7
    for schedule in ("1f1b", "zb-v"):
        _step(model_of(name), batch, schedule, [2, 1, 1])


STRATEGIES = ("default", "full")
FEATURES: list[Any] = [-1, -3, 2, [-1, -2], [1, 3], [1, 2, 3], [-2, -3]]


@pytest.mark.parametrize(
    ("layer", "strategy"),
    others_nightly(product(FEATURES, STRATEGIES), [(-3, "default"), ([1, 3], "full"), ([1, 2, 3], "default")]),
    ids=str,
)
def test_features_of_any_blocks_are_right(layer: Any, strategy: str) -> None:
    """Of one or several, with the class of the picture or without it.

    Where a cut is right behind such a block they are sent once, as gradients that came back in two messages would be
    summed in another order.
    """
    changes = {"vision_feature_layer": layer, "vision_feature_select_strategy": strategy}
    batch = batch_of("llava")
    if strategy == "full":
        changes["image_seq_length"] = 5
        batch["input_ids"][:, 1:6] = 299
    for schedule, cut in (("1f1b", [2, 1, 1]), ("zb-v", [3, 1, 1])):
        _step(model_of("llava", **changes), batch, schedule, cut)


def test_the_small_copy_is_cut_inside_its_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost there is found out, and the tower is then left whole, as no cut of it can be vouched for."""
    right = TowerBlockLayer.forward

    def wrong(self: TowerBlockLayer, value: Any) -> Any:
        new = right(self, value)
        return {**new, HIDDEN: new[HIDDEN].detach()} if HIDDEN in new else new

    monkeypatch.setattr(TowerBlockLayer, "forward", wrong)
    decoder = Decoder(config_of("llava"))
    assert decoder.anatomy.tower is None
    assert "cut into stages it has the loss of the whole, but the gradient" in decoder.anatomy.uncut
    assert decoder.num_layers == 4 + 2
    names = {name for layer in decoder.layers() for name, _ in layer.named_parameters()}
    assert names == set(dict(decoder.model.named_parameters()))
    monkeypatch.setattr(TowerBlockLayer, "forward", right)
    forward = MergeLayer.forward

    def twice(self: MergeLayer, value: Any) -> Any:
        new = forward(self, value)
        return {**new, HIDDEN: new[HIDDEN] * 2}

    monkeypatch.setattr(MergeLayer, "forward", twice)
    assert "cut into stages it has a loss of" in Decoder(config_of("paligemma")).anatomy.uncut


def test_small_copies_have_the_blocks_that_features_are_made_of() -> None:
    vision = {**FAMILIES["llava"]["vision_config"], "num_hidden_layers": 16}
    config = config_of("llava", vision_config=vision, vision_feature_layer=[6, -2, -8])
    decoder = Decoder(config)
    assert decoder.anatomy.uncut == ""
    assert decoder.anatomy.tower is not None
    assert decoder.anatomy.tower.selected == (5, 8, 14)


def test_a_tower_that_is_not_cut_says_why() -> None:
    text = FAMILIES["llava"]["text_config"]
    clip = FAMILIES["llava"]["vision_config"]
    two = {"vision_config": clip, "text_config": text, "image_token_index": 299, "image_token_id": 299}
    config = transformers.VideoLlavaConfig(**two, architectures=["VideoLlavaForConditionalGeneration"])
    model = transformers.VideoLlavaForConditionalGeneration(config)
    decoder = Decoder(model, compare=False)
    assert decoder.anatomy.tower is None
    assert "looked for one list of blocks in its tower for images and found 2" in decoder.anatomy.uncut
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
        "mlp_dim": 16,
        "output_channels": 8,
        "window_size": 2,
        "global_attn_indexes": [0],
    }
    config = transformers.GotOcr2Config(vision_config=vision, text_config={**text, "model_type": "qwen2"})
    decoder = Decoder(transformers.GotOcr2ForConditionalGeneration(config), compare=False)
    assert "model.vision_tower has a weight of its own, pos_embed" in decoder.anatomy.uncut
    assert Decoder(config_of("llama")).anatomy.uncut == "", "where there is none there is nothing to say"


OWN = """
import torch

def make_batches():
    draw = torch.Generator().manual_seed(1)
    for _ in range(8):
        tokens = torch.randint(3, 290, (8, 11), generator=draw)
        tokens[:, 1:5] = 299
        labels = tokens.masked_fill(tokens == 299, -100)
        pictures = torch.randn(8, 3, 8, 8, generator=draw)
        mask = torch.ones_like(tokens)
        yield {"input_ids": tokens, "attention_mask": mask, "labels": labels, "pixel_values": pictures}
"""
LORA = json.dumps({"r": 4, "target_modules": ["q_proj", "v_proj"]})


@pytest.mark.nightly
@pytest.mark.parametrize("name", TOWERS)
def test_at_the_prompt_a_cut_inside_a_tower_goes_with_all_else(name: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path / "model")
    (tmp_path / "own.py").write_text(OWN)
    usual = f"--batch 8 --microbatches 4 --steps 2 --lr 0.01 --threads 1 --in-process --model {tmp_path / 'model'}"
    inside, split = "--schedule 1f1b --ranks 4 --cut 2,1,2,5", "--schedule zb-v --ranks 2 --cut 2,1,2,5"
    runs = iter(range(99))

    def run(line: str, *more: str) -> list[float]:
        out = tmp_path / f"run{next(runs)}"
        assert main(["train", *f"{usual} --evaluate-every 0 {line}".split(), *more, "--out", str(out)]) == 0
        return losses(out)

    own = f"--data {tmp_path / 'own.py'}:make_batches"
    for data in ("", own):
        whole = run(f"{data} --schedule 1f1b --ranks 1")
        assert run(f"{data} {inside}") == whole
        assert run(f"{data} {inside} --recompute") == whole
        assert run(f"{data} {split}") == whole
        assert run(f"{data} {inside} --dp 2 --microbatches 2") == pytest.approx(whole, rel=1e-5)
    assert run(f"{own} {inside}", "--lora", LORA) == run(f"{own} --schedule 1f1b --ranks 1", "--lora", LORA)


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(TOWERS, ["paligemma"]))
def test_a_run_cut_inside_a_tower_is_resumed_and_exported(name: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path / "model")
    usual = "--batch 8 --microbatches 4 --lr 0.01 --evaluate-every 0 --threads 1 --in-process --schedule zb-h1"
    line = f"train {usual} --ranks 4 --cut 2,1,2,5 --model {tmp_path / 'model'} --out {tmp_path}"
    assert main(f"{line}/whole --steps 4 --export {tmp_path / 'exported'}".split()) == 0
    assert main(f"{line}/half --steps 2".split()) == 0
    assert main(f"train --resume {tmp_path / 'half'} --steps 4".split()) == 0
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    trained = dict(type(model_of(name)).from_pretrained(tmp_path / "exported").named_parameters())
    first = dict(model_of(name).named_parameters())
    moved = {key for key in first if not torch.equal(first[key], trained[key])}
    assert {"vision_tower", "multi_modal_projector", "language_model"} <= {key.split(".")[1] for key in moved}
    assert trained.keys() == first.keys()


def test_messages_are_counted_as_they_are_sent(tmp_path: Path) -> None:
    model_of("llava", vision_feature_layer=[1, -1]).save_pretrained(tmp_path)
    settings = Settings(model=str(tmp_path), schedule="1f1b", ranks=4, microbatches=4, batch=8, cut=(2, 1, 2, 5))
    schedule = settings.replica_schedule()
    task = DecoderTask(settings, schedule)
    value: Any = {name: each[:2] for name, each in task.read(None).batches[0].inputs.items()}
    sent = []
    for build in task.stages()[:-1]:
        value = build()(value)
        sent.append(float(sum(each.nbytes for each in flatten(value)[0])))
    assert len(value[HIDDEN]) == 2
    assert task.message_bytes(schedule) == [*sent, 0.0]
    first = task.decoder.anatomy.first_block - 1
    share = 5 / task.read(None).batches[0].inputs[TOKENS].shape[1]
    assert task.layer_costs[:first] == [max(1.0, share * each) for each in task.decoder.costs()[:first]]
