"""Whole jobs: what the user's environment must not change, and what must happen when a rank fails."""

from __future__ import annotations

from contract.cases import FAULTS, HOSTILE
from contract.check import Evidence, Violation, check
from contract.checks.judging import ROUNDING, require_equal

_MESSAGES = {
    "rank-raises": "the planted error",
    "rank-exits": "SystemExit: 3",
    "rank-is-killed": "killed",
    "rank-hangs": "stuck",
}


@check(
    "C43", FAULTS, traps="H2 H3 H13 H14", promises=["interface: If a rank raises an error, exits, is killed or hangs"]
)
def a_failing_rank_ends_the_job(evidence: Evidence) -> None:
    """A rank that raises an error, exits with 3, is killed or hangs ends the whole job in time, and is named.

    The check starts a job from the command line with a timeout of 10 s, and its last rank fails in the fifth batch. The
    job must end within twice the timeout, once for the collective that waits in vain and once for the launcher that
    ends the other ranks, plus the time that it took from the command line to the fault: on a busy machine, where
    starting processes takes longer, ending them does, too. The timeout also grows with the load of the machine. An
    adapter that relies on its library's own timeout of 10 or 30 minutes fails. The exit code must be 1, the message
    must name the rank and its error, the record must say failed, and no process of the job may be left.
    """
    (seen,) = evidence.ranks
    if seen["seconds"] is None:
        raise Violation("the job to reach its fifth batch", seen["message"][-300:] or "no message")
    require_equal(seen["return_code"], 1, what="exit code")
    limit = 2 * seen["timeout"] + seen["seconds_to_fault"]
    if seen["seconds"] > limit:
        raise Violation(f"an end within {limit:.0f} s of the fault", f"{seen['seconds']:.0f} s")
    for text in (f"rank {seen['faulty_rank']}", _MESSAGES[evidence.case.name]):
        if text not in seen["message"]:
            raise Violation(f"a message with {text!r}", seen["message"][-300:])
    require_equal(seen["left"], [], what="processes left behind:")
    require_equal(seen["status"], "failed", what="a record with the status")


@check("C44", [HOSTILE], traps="A12 H11 P7 L5 L10", promises=["interface: Environment variables, configuration files"])
def a_hostile_environment_changes_nothing(evidence: Evidence) -> None:
    """Environment variables, configuration files, files named like libraries and a used port change nothing.

    ACCELERATE_* variables and the user's configuration of accelerate ask for another precision and accumulation, RANK
    and WORLD_SIZE are wrong, warnings are errors, the working directory contains files named like the libraries, and a
    process listens on the usual port. Settings, threads, every loss and the final weights must be those of the same job
    without all this. With three ranks or more, losses need to agree to 1e-5 only, since ranks may be summed in another
    order.
    """
    (seen,) = evidence.ranks
    peaceful, hostile = seen["peaceful"], seen["hostile"]
    for name, record in (("in a normal environment", peaceful), ("in a hostile environment", hostile)):
        if "error" in record and record["error"] is not None:
            raise Violation(f"a completed run {name}", record["error"][-300:])
    require_equal(len(hostile["ranks"]), evidence.world_size, what="ranks:")
    is_exact = evidence.world_size <= 2
    for rank, (one, other) in enumerate(zip(peaceful["ranks"], hostile["ranks"], strict=True)):
        for name in ("effective_settings", "num_threads", "device", *(["weights_sha256"] if is_exact else [])):
            require_equal(other[name], one[name], what=name.replace("_", " "), rank=rank)
        require_equal(other["num_threads"], 1, what="threads:", rank=rank)
    for one, other in zip(peaceful["steps"], hostile["steps"], strict=True):
        if is_exact:
            require_equal(other, one, what="the step")
        elif not abs(other["loss"] - one["loss"]) <= ROUNDING * abs(one["loss"]):
            raise Violation(f"a loss of {one['loss']!r} in step {one['step']}", repr(other["loss"]))
