"""Writes docs/compatibility.md from the table of features that exclude one another, in `runtime/compatibility.py`.

python docs/site/compatibility.py > docs/compatibility.md
"""

from __future__ import annotations

from penstock.runtime.compatibility import REFUSALS

OF_SCHEDULES = (
    ("a rank that hosts a stage in two pipelines", "copies are there so that other ranks run them"),
    ("stages that feed one another and work on numbers of microbatches that do not match", "samples would not match"),
    ("updates as ops beside REDUCE ops", "each update sums over the replicas itself"),
    ("a parameter of a shared stage and of one on other ranks", "the ranks of the former have a part of it each"),
    ("links with a bound (depth) that the order outgrows", "every rank would wait to send"),
)
"""What is refused of single schedules and models, and why."""

OF_OTHER_PARTS = (
    ("`check`", "schedules that are not right, each by its rule", "[schedule](schedule.md)"),
    ("passes", "what a pass does not support, such as updates as ops", "[passes](passes.md)"),
    ("`ps.plan`", "memory limits under which no order exists", "[planning](planning.md#limits-that-leave-nothing)"),
    ("`ps.plan`", "pairs together with other features", "[planning](planning/pairs.md)"),
    ("dispatch", "ways to wait that only the simulator has", "[dispatch](dispatch.md#waiting)"),
    ("transports", "schedules that need more lines than a GPU has queues", "[transports](runtime/transports.md)"),
    ("meshes", "parts of parameters on a GPU (tp, fsdp) over gloo", "[meshes](runtime/meshes.md#on-gpus)"),
    ("optimizers", "rules and meshes that an optimizer can't serve", "[weight versions](runtime/weight-versions.md)"),
    ("checkpoints", "what can't be saved", "[checkpoints](runtime/checkpoints.md)"),
    ("`penstock train`", "options that exclude each other", "[training](train.md#options-that-exclude-each-other)"),
    ("`penstock train`", "another model, optimizer, seed or data with `--resume`", "[resuming](train/resuming.md)"),
    ("`penstock train`", "options of data and learning with `--device emulated`", "[emulated](train/emulated.md)"),
    ("asynchronous runs", "tied weights and optimizers under some rules", "[asynchronous](train/asynchronous.md)"),
    ("your own model", "what can't be cut, and options that it can't have", "[your model](train/your-model.md)"),
    ("any module", "what tracing would freeze or lose", "[models](models/any-module.md)"),
    ("Hugging Face", "models that differ when they are cut", "[models](models/hugging-face.md)"),
    ("pictures", "pictures whose number or shape does not fit", "[models](models/hugging-face.md#pictures)"),
    ("adapters", "some options of peft", "[models](models/hugging-face.md#lora)"),
    (
        "encoder and decoder",
        "tensor parallelism, and shared stages",
        "[models](models/hugging-face.md#encoder-and-decoder)",
    ),
    ("`PipelineTrainer`", "some arguments of the Trainer", "[integrations](integrations.md)"),
    ("the tuner", "estimates, recomputation and shared ends for some models", "[tune](tune.md#your-own-model)"),
    ("files", "other versions of a file, and letters it can't have", "[formats](formats.md)"),
    ("`penstock analyze`", "traces that are not whole", "[analyze](analyze.md#what-is-refused)"),
    ("the lab", "conditions that are about messages", "[lab](lab.md)"),
    ("the playground", "branching stages, updates, declared orders", "[playground](play.md)"),
)
"""What refuses something besides a pipeline, what it refuses, and the page that says it all."""


def page() -> str:
    """The table as a page of the docs."""
    rows = [f"| {row.one} | {row.other} | {row.why} | {row.instead} |" for row in REFUSALS]
    schedules = [f"| {what} | {why} |" for what, why in OF_SCHEDULES]
    others = [f"| {part} | {what} | {where} |" for part, what, where in OF_OTHER_PARTS]
    return "\n".join([*_HEAD, *rows, *_BETWEEN, *schedules, *_OTHERS, *others, ""])


_HEAD = (
    "# What excludes what",
    "",
    "A pipeline that has both features of a row is refused where it is made, with the reason given here. The page is",
    "written from the table in `runtime/compatibility.py`.",
    "",
    "| feature | other feature | why | instead |",
    "|---|---|---|---|",
)
_BETWEEN = (
    "",
    "Some schedules and models are refused by themselves, by name too:",
    "",
    "| what | why |",
    "|---|---|",
)
_OTHERS = (
    "",
    "## What other parts refuse",
    "",
    "The tables above have what a pipeline refuses. Other parts of Penstock refuse more, each by name. The page in",
    "the last column has the details.",
    "",
    "| what refuses | what is refused, in short | page |",
    "|---|---|---|",
)


if __name__ == "__main__":
    print(page(), end="")
