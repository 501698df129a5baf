"""How samples are laid out in batches: as asked, or the best that task, model and backend can do."""

from __future__ import annotations

from launch.errors import UsageError
from records.config import Batching, RunConfig, RunOptions
from tasks.interface import PackedData, Task
from training.plan import Plan, expected_imbalance, most_unequal_step

# How many times the mean a rank may have to compute without a word about it, on average over steps.
_TOLERATED_IMBALANCE = 1.05
# The same in a single step, which makes a training little longer unless it is far out.
_TOLERATED_IN_ONE_STEP = 1.5


def settle_batching(options: RunOptions, task: Task, *, cuts_batches: bool = False) -> Batching:
    """Returns how samples are laid out: as asked, or the best that the task, its model and the backend can do.

    Args:
        options: The options of the run.
        task: The task, prepared.
        cuts_batches: Whether the backend cuts each batch along its first dimension.

    Raises:
        UsageError: One of them cannot do what is asked.
    """
    stranger, has_costs = _stranger_to_packing(task), task.costs("train") is not None
    refusal = why_not_packed(task, torch_compile=options.torch_compile, cuts_batches=cuts_batches)
    if options.batching == "packed" and refusal:
        raise UsageError(f"--batching packed: {refusal}; use --batching sorted or padded")
    if options.batching == "sorted" and not has_costs:
        raise UsageError("--batching sorted: the task does not tell the lengths of its samples; use --batching padded")
    if options.sync_batchnorm:
        return "padded"
    if options.batching is not None:
        return options.batching
    if not refusal:
        return "packed"
    # Compiled, sorted batches were timed with texts of one length only, where they cannot gain (docs/speed.md).
    return "sorted" if has_costs and stranger is None and not options.torch_compile else "padded"


def why_not_packed(task: Task, *, torch_compile: bool, cuts_batches: bool) -> str:
    """Says why samples cannot be kept in one row without padding; an empty string if they can.

    Args:
        task: The task, prepared.
        torch_compile: Whether the model is compiled.
        cuts_batches: Whether the backend cuts each batch along its first dimension.
    """
    refusal = "the task has no such batches"
    if (stranger := _stranger_to_packing(task)) is not None:
        refusal = f"{stranger} changes the task that has such batches, and has no collate_packed of its own"
    elif isinstance(task, PackedData):
        refusal = task.packing_refusal() or ""
    if cuts_batches:
        refusal = refusal or "the backend cuts batches into shares, and a row of samples cannot be cut"
    if torch_compile:
        refusal = refusal or "--torch-compile would compile the model again for each batch"
    return refusal


def _stranger_to_packing(task: Task) -> str | None:
    """Returns the name of the task's class if it does its work in a way that a packed batch may not fit."""
    at_work = {"collate", "collate_packed", "build_model", "loss_sum", "evaluation_rows"}
    first = next(one for one in type(task).__mro__ if at_work & set(vars(one)))
    return first.__name__ if isinstance(task, PackedData) and "collate_packed" not in vars(first) else None


def describe_padding(config: RunConfig, task: Task, *, cuts_batches: bool) -> str | None:
    """Says why batches have padding, if those of the task need none."""
    if config.batching == "packed" or not isinstance(task, PackedData):
        return None
    refusal = why_not_packed(task, torch_compile=config.torch_compile, cuts_batches=cuts_batches)
    return (
        f"batches are {config.batching} instead of packed, which would need no padding: {refusal}" if refusal else None
    )


def describe_imbalance(config: RunConfig, task: Task, *, cuts_batches: bool) -> str | None:
    """Says that ranks get unequal work, on average or in a single step, if they do, and what would help."""
    plan = Plan.of(config, task)
    imbalance, where = expected_imbalance(plan), ""
    if imbalance <= _TOLERATED_IMBALANCE:
        step, imbalance = most_unequal_step(plan, config.num_steps(plan.steps_per_epoch))
        if imbalance <= _TOLERATED_IN_ONE_STEP:
            return None
        where = f" in step {step} of the first epoch"
    best = settle_batching(config.model_copy(update={"batching": None}), task, cuts_batches=cuts_batches)
    layout = "" if best in (config.batching, "padded") else f"--batching {best}, "
    return (
        f"ranks get unequal work{where}: the one with most has {imbalance:.2f} times the mean, and the others wait for "
        f"it; {layout}a larger --global-batch-size or fewer ranks may help"
    )
