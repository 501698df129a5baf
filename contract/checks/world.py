"""The group of ranks: which ranks are in it, whether they reach each other, and how it ends."""

from __future__ import annotations

import json

from contract.case import FINE_FLOAT64, LARGE_INT64
from contract.cases import BARRIER, COLLECTIVES, PLAIN, REFUSALS, SHUTDOWN, WORLD
from contract.check import Evidence, Violation, check
from contract.checks.judging import require, require_equal


@check(
    "C01",
    [WORLD],
    traps="O6 L1 L2 L3 L4",
    promises=["Backend: The group consists of the ranks", "Backend: Every rank has the `rank`"],
)
def group_is_the_one_asked_for(evidence: Evidence) -> None:
    """The group is the one that was asked for: N distinct ranks, each of which reaches all others.

    Every other check is meaningless in a group that fails this one: a process that another library's launcher has
    started often finds itself alone, N times over, and agrees with itself. The sum of all ranks must be N(N-1)/2,
    every rank must receive the facts of every other rank, each rank must have the number that its launcher gave it,
    and the local ranks on one machine must be distinct.
    """
    world_size = evidence.world_size
    facts = [{name: seen[name] for name in ("rank", "local_rank", "device")} for seen in evidence.ranks]
    for rank, seen in enumerate(evidence.ranks):
        require_equal(seen["world_size"], world_size, what="a world size of", rank=rank)
        require_equal(seen["rank"], rank, what="the rank that the launcher gave:", rank=rank)
        require_equal(seen["local_rank"], rank, what="a local rank of", rank=rank)
        require_equal(seen["sum_of_ranks"], world_size * (world_size - 1) / 2, what="a sum of all ranks of", rank=rank)
        require_equal(seen["gathered"], facts, what="the facts of all ranks:", rank=rank)


@check(
    "C02",
    [COLLECTIVES],
    traps="S10",
    promises=[
        "Backend.all_reduce: The result is the sum",
        "Backend.all_reduce: The result keeps the dtype",
        "Backend.all_reduce: The call does not change `tensor`",
    ],
)
def all_reduce_reduces(evidence: Evidence) -> None:
    """`all_reduce` returns the sum, minimum or maximum to every rank and leaves its argument unchanged.

    The check reduces float32, float64, int32 and int64, numbers that need all digits of their dtype, many elements, a
    tensor that is not contiguous, and a 0-d tensor, since the loop gathers
    metrics, records and losses in this way. A reduction in place would change what the caller still holds, and one
    whose result is dropped would leave each rank with its own value.
    """
    world_size = evidence.world_size
    expected = {
        "sum": [sum(range(1, world_size + 1)), -sum(range(world_size))],
        "min": [1, -(world_size - 1)],
        "max": [world_size, 0],
    }
    for rank, seen in enumerate(evidence.ranks):
        for result in seen["results"]:
            what = f"{result['operation']} in {result['asked_dtype']}"
            require_equal(result["result"], expected[result["operation"]], what=what, rank=rank)
            require_equal(result["dtype"], result["asked_dtype"], what=f"{what} to be", rank=rank)
            require(result["untouched"], f"{what} to leave its argument unchanged", "a changed argument", rank)
        offset = sum(range(world_size))
        digits = {
            "torch.int64": [world_size * LARGE_INT64 + offset],
            "torch.float64": [world_size * FINE_FLOAT64 + offset],
        }
        require_equal(seen["digits"], digits, what="sums of numbers with many digits:", rank=rank)
        require(seen["strided"], "the sum of a transposed tensor", "other elements", rank)
        require(seen["many"], "the sum of 300 x 1000 elements", "other elements", rank)
        require(seen["kept"], "a result that a later reduction leaves unchanged", "a changed result", rank)
        require_equal(
            (seen["scalar"], seen["scalar_shape"]), (world_size, []), what="a 0-d sum and its shape:", rank=rank
        )


@check("C03", [BARRIER], promises=["Backend.barrier: The call returns on no rank before every rank has called it"])
def barrier_waits(evidence: Evidence) -> None:
    """`barrier` returns on no rank before every rank has called it.

    Each rank in turn is late and writes a file just before it enters. A rank that leaves the barrier without finding
    the file has not waited.
    """
    for rank, seen in enumerate(evidence.ranks):
        expected = [True] * evidence.world_size
        require_equal(seen["found"], expected, what="the file of each late rank after the barrier:", rank=rank)


@check(
    "C04",
    [REFUSALS],
    traps="L7",
    promises=[
        "Capabilities: A request that is not declared",
        "Backend.__init__: Options that `capabilities` does not declare",
    ],
)
def undeclared_requests_are_refused(evidence: Evidence) -> None:
    """The constructor refuses what the backend does not declare, with an UnsupportedError that names the value.

    The check asks for every precision and device that the capabilities exclude, for some that do not exist, and for
    one rank more than the limit. There is no group at that moment, so an adapter that joins its group before it
    checks the options fails, too.
    """
    answers = evidence.ranks[0]["answers"]
    if not answers:
        raise Violation("an answer to requests that are not declared", "no answer in time")
    for answer in answers:
        asked = ", ".join(f"{name}={value}" for name, value in answer["asked"].items())
        if answer["error"] is None:
            raise Violation(f"UnsupportedError for {asked}", "it was accepted")
        if not answer["clear"]:
            raise Violation(f"UnsupportedError for {asked}", f"{answer['type']}: {answer['error']}"[:300])
        if answer["names"] not in answer["error"]:
            raise Violation(f"a refusal that names {answer['names']}", answer["error"][:300])


@check("C05", [SHUTDOWN], traps="L11", promises=["Backend.shutdown: The call returns on every rank"])
def group_ends(evidence: Evidence) -> None:
    """`shutdown` returns on every rank, and the launcher then ends with exit code 0.

    By then, the group has run all its other cases. The check fails if a rank cannot leave the group, leaves while
    others still communicate, or crashes afterwards. It runs once for each group.
    """
    require_equal(len(evidence.ranks), evidence.world_size, what="ranks that left the group")


@check("C06", [PLAIN[0]], promises=["Backend.effective_settings: The settings are plain facts"])
def settings_are_reported(evidence: Evidence) -> None:
    """`effective_settings` returns plain facts, among them the transport, that are the same on all ranks.

    They go into the record of a run, where a comparison looks for differences. Therefore they must be JSON.
    """
    first = evidence.ranks[0][0]["settings"]
    for rank, seen in enumerate(evidence.ranks):
        settings = seen[0]["settings"]
        if settings.startswith("not JSON"):
            raise Violation("settings that are JSON", settings, rank)
        if "transport" not in json.loads(settings):
            raise Violation("settings that name the transport", settings, rank)
        require_equal(settings, first, what="the settings of rank 0:", rank=rank)
