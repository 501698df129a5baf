"""Statistics that are taken over the samples of all ranks, in the middle of forward and backward passes."""

from __future__ import annotations

from contract.cases import BATCH_NORM
from contract.check import SEVERAL, Evidence, check
from contract.checks.judging import (
    TIGHT,
    bound,
    config_of,
    initial_weights,
    require_close,
    require_equal,
    require_same_bits,
)
from contract.reference import Arithmetic, simulate


@check(
    "C54",
    [BATCH_NORM],
    traps="G22 G23",
    promises=["Backend.all_reduce: The call may be made in the middle"],
    world_sizes=SEVERAL,
)
def batch_norm_is_that_of_one_process(evidence: Evidence) -> None:
    """With `sync_batchnorm`, every rank has the weights of one process with torch's BatchNorm, to 1e-12 in float64.

    The process computes the samples of all ranks in a micro-step together, with as many micro-steps. In the last step
    of an epoch, ranks have unequal numbers of samples, or one of them has none and computes one of another, which must
    not count. All ranks must end with the same bits in the running statistics.
    """
    tolerance = bound(evidence, TIGHT)
    for number in range(len(evidence.case.trainings)):
        config = config_of(evidence, number)
        together = config.micro_batch_size * config.num_processes
        alone = {"num_processes": 1, "micro_batch_size": together, "sync_batchnorm": False}
        expected = simulate(initial_weights(evidence, number), config.model_copy(update=alone), Arithmetic()).weights
        for rank, seen in enumerate(evidence.ranks):
            steps = seen[number]["steps"]
            require_equal(len(steps), len(expected), what="optimizer steps:", rank=rank)
            for step, (observed, weights) in enumerate(zip(steps, expected, strict=True), start=1):
                require_close(observed["weights"], weights, tolerance, what=f"weights after step {step}", rank=rank)
            what = "the running statistics of rank 0"
            require_same_bits(seen[number]["buffers"], evidence.ranks[0][number]["buffers"], what=what, rank=rank)
