"""Which samples are trained and evaluated on, and which numbers are reported of them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from contract.cases import LAYOUTS, ONE_BY_ONE_EVALUATION, PLAIN, SMALL_EVALUATION
from contract.check import Evidence, Violation, check
from contract.checks.judging import TIGHT, bound, config_of, reference_of, require_equal
from contract.reference import global_batches, micro_batches


@check(
    "C11",
    [*PLAIN, *LAYOUTS],
    traps="O3 S5 S6 S7 A9 A11 H4",
    promises=["interface: In every micro-step, every rank computes the samples"],
)
def samples_follow_the_plan(evidence: Evidence) -> None:
    """In every micro-step, every rank computes the samples that the plan gives it, in the order of the plan.

    The reference computes the plan again from its description. All ranks take the same number of micro-steps, also
    for the short last batch of an epoch.
    """
    config = config_of(evidence)
    batches = [batch for epoch in global_batches(config) for batch in epoch]
    for rank, (seen,) in enumerate(evidence.ranks):
        require_equal(len(seen["steps"]), len(batches), what="optimizer steps:", rank=rank)
        for number, (step, batch) in enumerate(zip(seen["steps"], batches, strict=True), start=1):
            share = micro_batches(config, batch)[rank]
            # A rank that has no sample left computes any sample of the batch with weight 0.
            computed = [
                [] if micro_batch["coefficient"] == 0 else micro_batch["sample_ids"]
                for micro_batch in step["micro_batches"]
            ]
            require_equal(computed, share, what=f"the samples in step {number}:", rank=rank)


@check(
    "C12",
    [*PLAIN, *LAYOUTS],
    traps="S1 S2 S15 A2",
    promises=["interface: In an epoch, all ranks together train on each sample exactly once"],
)
def every_sample_counts_once_per_epoch(evidence: Evidence) -> None:
    """In an epoch, all ranks together train on each sample exactly once, and the next epoch has another order.

    The check counts the samples that entered the loss with a weight. It notices padding, repetition and dropped
    remainders.
    """
    config = config_of(evidence)
    num_samples = config.task_settings["num_train_samples"]
    steps_per_epoch = -(-num_samples // config.global_batch_size)
    orders = []
    for epoch in range(config.num_train_epochs):
        order = [
            sample_id
            for number in range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
            for (seen,) in evidence.ranks
            for micro_batch in (seen["steps"][number]["micro_batches"] if number < len(seen["steps"]) else [])
            if micro_batch["coefficient"] != 0
            for sample_id in micro_batch["sample_ids"]
        ]
        counts = Counter(order)
        wrong = {i: counts[i] for i in {*range(num_samples), *counts} if counts[i] != 1}
        if wrong:
            raise Violation(
                f"each of {num_samples} samples once in epoch {epoch}", f"these counts by sample: {wrong}"[:200]
            )
        orders.append(order)
    if any(first == second for first, second in pairwise(orders)):
        raise Violation("another order in every epoch", "the same order twice")


_EVALUATIONS = (*PLAIN, *LAYOUTS, SMALL_EVALUATION, ONE_BY_ONE_EVALUATION)


@check(
    "C13",
    _EVALUATIONS,
    traps="S2 S4 S5 S11",
    promises=["interface: An evaluation computes each validation sample exactly once"],
)
def evaluation_sees_every_sample_once(evidence: Evidence) -> None:
    """An evaluation computes each validation sample exactly once, on one of the ranks, whatever the sizes.

    There are 23, 7 or 3 samples in batches of 5 or 1, so that nothing divides evenly. With 3 samples in batches of 5,
    only rank 0 has samples, and the evaluation must not hang. Where each rank holds a part of each weight, all ranks
    make equally many forward passes: a rank that has a batch less computes sample 0 instead, which does not count.
    """
    config = config_of(evidence)
    num_samples = config.task_settings["num_validation_samples"]
    num_left_over = 0
    if evidence.ranks[0][0]["setup"]["shards_weights"]:
        num_left_over = (num_samples // -config.eval_batch_size) % evidence.world_size
    for number in range(len(evidence.ranks[0][0]["evaluated"])):
        counts = Counter(i for (seen,) in evidence.ranks for i in seen["evaluated"][number])
        counts[0] -= num_left_over
        wrong = {i: counts[i] for i in {*range(num_samples), *counts} if counts[i] != 1}
        if wrong:
            raise Violation(f"each of {num_samples} validation samples once", f"these counts by sample: {wrong}"[:200])


@check("C14", _EVALUATIONS, traps="S3 S4 S8 S9 S11 H8", promises=["interface: Every metric of an evaluation"])
def metrics_are_those_of_one_process(evidence: Evidence) -> None:
    """Every metric of an evaluation is, on every rank, the one that a single process computes from all samples.

    One of them is macro F1, which is not an average over samples or ranks. Some ranks see labels that others do not,
    the last batch is short, and some ranks have no sample. The reference counts every target and prediction.
    """
    expected = reference_of(evidence).evaluations
    for rank, (seen,) in enumerate(evidence.ranks):
        require_equal(len(seen["evaluations"]), len(expected), what="evaluations:", rank=rank)
        for epoch, (metrics, wanted) in enumerate(zip(seen["evaluations"], expected, strict=True)):
            require_equal(sorted(metrics), sorted(wanted), what="metrics", rank=rank)
            for name, value in wanted.items():
                if metrics[name] is None or abs(metrics[name] - value) > bound(evidence, TIGHT) * abs(value):
                    raise Violation(f"{name} {value!r} after epoch {epoch}", repr(metrics[name]), rank)


@check("C15", [*PLAIN, *LAYOUTS], traps="G18", promises=["interface: The loss that is logged for a step"])
def logged_loss_is_the_global_mean(evidence: Evidence) -> None:
    """The loss that is logged for a step is, on every rank, the mean over all targets of the global batch."""
    expected = reference_of(evidence).losses
    for rank, (seen,) in enumerate(evidence.ranks):
        require_equal(len(seen["losses"]), len(expected), what="logged losses:", rank=rank)
        for step, (loss, wanted) in enumerate(zip(seen["losses"], expected, strict=True), start=1):
            if loss is None or abs(loss - wanted) > bound(evidence, TIGHT) * abs(wanted):
                raise Violation(f"a loss of {wanted!r} in step {step}", repr(loss), rank)
