"""The Trainer whose model is a pipeline, in one process: what it refuses; its numbers are the plain one's."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime.checkpoint import CheckpointError
from trainer_runs import Tokens, arguments, counted, logged, run, tiny

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from penstock.integrations.transformers import PipelineTrainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def short(folder: Path, **changes: Any) -> Any:
    options = {"max_steps": 3, "save_strategy": "no", "eval_strategy": "no"}
    return arguments(folder, **{**options, **changes})


@pytest.mark.parametrize(
    ("changes", "others", "wanted"),
    [
        ({"bf16_full_eval": True}, {}, "bf16_full_eval casts the model"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size trains again from the start"),
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha draws its noise"),
        ({"torch_empty_cache_steps": 2}, {}, "torch_empty_cache_steps empties"),
        ({"train_sampling_strategy": "batch_rebalance"}, {}, "batch_rebalance"),
        ({"accelerator_config": {"split_batches": True}}, {}, "split_batches"),
        ({}, {"model_init": tiny, "model": None}, "give the model"),
        ({}, {"schedule": ps.build("1f1b", 2, 8)}, "has 8 microbatches, and gradient_accumulation_steps is 4"),
        ({}, {"schedule": ps.build("1f1b", 4, 4), "num_ranks": 2}, "the schedule has 4 ranks, num_ranks is 2"),
        ({}, {"schedule": ps.build("pipedream", 2, 4, window=1)}, "updates as ops"),
    ],
)
def test_what_a_pipeline_does_not_take_is_refused_by_name(
    tmp_path: Path, changes: Any, others: Any, wanted: str
) -> None:
    given = {"model": tiny(), "num_ranks": 2, "train_dataset": Tokens(), **others}
    with pytest.raises(ps.RuntimeFailure, match=wanted):
        PipelineTrainer(args=short(tmp_path, **changes), **given)


def test_a_schedule_that_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ps.ScheduleError):
        PipelineTrainer(tiny(), short(tmp_path), schedule="dualpipe", num_ranks=3, train_dataset=Tokens())


def test_a_checkpoint_of_the_plain_trainer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    trainer = PipelineTrainer(tiny(), short(tmp_path), num_ranks=2, train_dataset=Tokens())
    with pytest.raises(CheckpointError, match="written by a plain Trainer"):
        trainer.train(resume_from_checkpoint=True)


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Of the tokens as they stand, not of those that follow."""
    logits = outputs["logits"].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch * 3


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    model = tiny(tie_word_embeddings=False)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "others", "make"),
    [
        pytest.param(
            {"logging_steps": 2, "label_smoothing_factor": 0.1, "max_grad_norm": 0.0},
            {},
            tiny,
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"optim": "sgd", "gradient_accumulation_steps": 3, "bf16": True}, {}, tiny, marks=pytest.mark.nightly
        ),
        pytest.param({}, {"compute_loss_func": own_loss}, tiny, marks=pytest.mark.nightly),
        ({"lr_scheduler_type": "linear", "warmup_steps": 2}, {}, adapted),
    ],
    ids=["smoothed", "three microbatches in bfloat16", "own loss", "lora"],
)
def test_it_logs_what_the_plain_trainer_logs(tmp_path: Path, changes: Any, others: Any, make: Any) -> None:
    plain = run(transformers.Trainer(make(), short(tmp_path, **changes), train_dataset=Tokens(), **others))
    trainer = PipelineTrainer(make(), short(tmp_path, **changes), num_ranks=2, train_dataset=Tokens(), **others)
    got = run(trainer)
    assert got["logged"] == plain["logged"]
    assert plain["logged"][0]["loss"] > 0
    for name, value in plain["weights"].items():
        assert torch.equal(got["weights"][name], value), name


def scaled(kind: type[Any], init_scale: float) -> type[Any]:
    """A Trainer whose accelerator computes in float16 on a CPU, too, and scales losses."""

    class Scaled(kind):  # type: ignore[misc, valid-type]
        def create_accelerator_and_postprocess(self) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(accelerate.Accelerator, "__init__", with_scaler(accelerate.Accelerator.__init__))
                super().create_accelerator_and_postprocess()

    def with_scaler(made: Any) -> Any:
        def init(self: Any, *args: Any, **given: Any) -> None:
            made(self, *args, **given)
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)

        return init

    return Scaled


def overflows(done: dict[str, Any]) -> list[float]:
    """The norms that are no numbers."""
    return [line["grad_norm"] for line in done["logged"] if not math.isfinite(line.get("grad_norm", 0.0))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optim", "init_scale"),
    [("adamw_torch_fused", 2.0**8), ("adamw_torch", 2.0**22), ("adamw_torch_fused", 2.0**22)],
)
def test_fp16_was_refused_where_losses_are_scaled(tmp_path: Path, optim: str, init_scale: float) -> None:
    """An update that is left out leaves the learning rate where it is, unless the optimizer is fused."""
    given = {"fp16": True, "max_steps": 6, "optim": optim}
    plain = scaled(transformers.Trainer, init_scale)(tiny(), short(tmp_path, **given), train_dataset=Tokens())
    wanted = run(plain)
    ours = scaled(PipelineTrainer, init_scale)(tiny(), short(tmp_path, **given), num_ranks=2, train_dataset=Tokens())
    got = run(ours)
    assert repr(got["logged"]) == repr(wanted["logged"])  # norms of overflows are no numbers
    assert bool(overflows(got)) == (init_scale > 2**16)
    assert len(overflows(got)) < 6
    assert not [name for name, value in wanted["weights"].items() if not torch.equal(got["weights"][name], value)]
    assert ours._scaler.state_dict() == plain.accelerator.scaler.state_dict()


@pytest.mark.slow
def test_fp16_on_a_cpu_computes_in_float32_as_the_plain_trainer_does(tmp_path: Path) -> None:
    wanted = run(transformers.Trainer(tiny(), short(tmp_path, fp16=True), train_dataset=Tokens()))
    ours = PipelineTrainer(tiny(), short(tmp_path, fp16=True), num_ranks=2, train_dataset=Tokens())
    assert run(ours)["logged"] == wanted["logged"]


@pytest.mark.slow
def test_it_evaluates_and_predicts_before_it_trains(tmp_path: Path) -> None:
    trainer = PipelineTrainer(
        tiny(), short(tmp_path), num_ranks=2, eval_dataset=Tokens(6), compute_metrics=counted, train_dataset=Tokens()
    )
    before = trainer.evaluate()
    predicted = trainer.predict(Tokens(6))
    whole = transformers.Trainer(tiny(), short(tmp_path), eval_dataset=Tokens(6), compute_metrics=counted).evaluate()
    assert before["eval_tokens"] == whole["eval_tokens"]
    assert predicted.predictions.shape == (6, 12, 64)
    model = tiny().eval()
    losses = []
    for start, size in ((0, 4), (4, 2)):  # each evaluation batch in microbatches of one sample
        batch = [Tokens(6)[index] for index in range(start, start + size)]
        num = sum((each["labels"][1:] != -100).sum() for each in batch)
        total = torch.zeros(())
        with torch.no_grad():
            for each in batch:
                total = total + model(**{k: v[None] for k, v in each.items()}, num_items_in_batch=num).loss
        losses += [total] * size
    assert before["eval_loss"] == torch.stack(losses).numpy().mean().item()
    trainer.train()
    assert trainer.evaluate()["eval_loss"] != before["eval_loss"]
    assert [list(line) for line in logged(trainer)][-1] == ["epoch", "eval_loss", "eval_tokens"]
    trainer.pipeline.close()


def test_a_loss_that_adds_up_is_not_weighed() -> None:
    class Summed:
        adds_up = True

        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            return (output - target).square().sum() / 7

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    shares = [Summed()(model(a), b) for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True)]
    for each in shares:
        each.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with ps.Pipeline(model, ps.build("1f1b", 2, 3), loss_fn=Summed(), optimizer=torch.optim.SGD) as pipe:
        result = pipe.step(x, y, update=False)
        assert torch.equal(result.losses, torch.stack([each.detach() for each in shares]))
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))
        norm = torch.nn.utils.get_total_norm(wanted)
        assert torch.equal(pipe.clip(norm.item() / 2), norm)
        kept = [nn.Parameter(torch.zeros_like(g)) for g in wanted]
        for parameter, gradient in zip(kept, wanted, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(kept, norm.item() / 2)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), kept, strict=True))


def test_updates_as_ops_are_clipped_by_their_option() -> None:
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with (
        ps.Pipeline(
            stages, ps.build("pipedream", 2, 4, window=1), loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD
        ) as pipe,
        pytest.raises(ps.RuntimeFailure, match=r"PrecisionOptions\(clip_norm=...\)"),
    ):
        pipe.clip(1.0)


def test_penstock_and_its_integrations_are_imported_without_torch() -> None:
    program = "import sys, penstock, penstock.integrations; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
