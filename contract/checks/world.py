"""The group of ranks itself: who is in it, what reaches whom, and how it ends."""

from __future__ import annotations

import json

from contract.cases import BARRIER, COLLECTIVES, PLAIN, REFUSALS, SHUTDOWN, WORLD
from contract.check import Evidence, Violation, check
from contract.checks.judging import require_equal


@check("C01", [WORLD], traps="O6 L1 L2 L3 L4")
def world_is_the_one_asked_for(evidence: Evidence) -> None:
    """The world is the one asked for: so many distinct ranks, and each reaches all others.

    Every other check is void in a group that breaks this one, since a script started by the wrong
    launcher often finds itself alone, N times over, and agrees with itself. The sum of all ranks
    must be N(N-1)/2, every rank must receive the facts of every other, the number a rank has must
    be the one its launcher gave it, and local ranks on one machine must be distinct.
    """
    world_size = evidence.world_size
    facts = [{name: seen[name] for name in ("rank", "local_rank", "device")} for seen in evidence.ranks]
    for rank, seen in enumerate(evidence.ranks):
        require_equal(seen["world_size"], world_size, what="a world size of", rank=rank)
        require_equal(seen["rank"], rank, what="the rank the launcher gave,", rank=rank)
        require_equal(seen["local_rank"], rank, what="as local rank on the only machine", rank=rank)
        require_equal(seen["sum_of_ranks"], world_size * (world_size - 1) / 2, what="ranks to sum up to", rank=rank)
        require_equal(seen["gathered"], facts, what="the facts of all ranks,", rank=rank)


@check("C02", [COLLECTIVES], traps="S10")
def all_reduce_reduces(evidence: Evidence) -> None:
    """`all_reduce` returns the sum, minimum or maximum over ranks to each, and leaves its argument alone.

    In float32, float64, int32 and int64, for many elements and for a 0-d tensor: the loop gathers
    metrics, records and losses through it. An in-place reduction would change what the caller still holds; one
    whose result is dropped would leave each rank its own.
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
            require_equal(result["untouched"], True, what=f"{what} to leave its argument alone:", rank=rank)
        require_equal(seen["many"], True, what="the right sum of 300 x 1000 elements:", rank=rank)
        require_equal(seen["kept"], True, what="a result to outlive the next reduction:", rank=rank)
        require_equal((seen["scalar"], seen["scalar_shape"]), (world_size, []), what="a 0-d sum,", rank=rank)


@check("C03", [BARRIER])
def barrier_waits(evidence: Evidence) -> None:
    """`barrier` returns on no rank before every rank has called it.

    Each rank in turn comes late and leaves a file on its way in; whoever passes without finding the
    file did not wait.
    """
    for rank, seen in enumerate(evidence.ranks):
        expected = [True] * evidence.world_size
        require_equal(seen["found"], expected, what="to find what late ranks left before the barrier:", rank=rank)


@check("C04", [REFUSALS], traps="L7")
def undeclared_requests_are_refused(evidence: Evidence) -> None:
    """What a backend does not declare, its constructor refuses with UnsupportedError, naming the value.

    Asked for every precision and device that the capabilities exclude, for some that nobody has,
    and for one rank more than the limit; no group exists at that moment, so an adapter that joins
    first and asks later fails here too.
    """
    answers = evidence.ranks[0]["answers"]
    if not answers:
        raise Violation("an answer to requests that are not declared", "none in time")
    for answer in answers:
        asked = ", ".join(f"{name}={value}" for name, value in answer["asked"].items())
        if answer["error"] is None:
            raise Violation(f"UnsupportedError for {asked}", "it was accepted")
        if not answer["clear"]:
            raise Violation(f"UnsupportedError for {asked}", f"{answer['type']}: {answer['error']}"[:300])
        if answer["names"] not in answer["error"]:
            raise Violation(f"a refusal that names {answer['names']}", answer["error"][:300])


@check("C05", [SHUTDOWN], traps="L11")
def group_ends(evidence: Evidence) -> None:
    """`shutdown` returns on every rank, and the launcher then ends with code 0.

    The group has by then run every other case. A rank that cannot let go of the group, that leaves
    while others still talk, or that dies of it makes this fail: it runs once for each group.
    """
    require_equal(len(evidence.ranks), evidence.world_size, what="ranks that left the group")


@check("C06", [PLAIN[0]])
def settings_are_told(evidence: Evidence) -> None:
    """`effective_settings` reads back plain facts, among them the transport, the same on all ranks.

    They go into the run record, where a comparison looks for what differed: so they must be JSON.
    """
    first = evidence.ranks[0][0]["settings"]
    for rank, seen in enumerate(evidence.ranks):
        settings = seen[0]["settings"]
        if settings.startswith("not JSON"):
            raise Violation("settings that are JSON", settings, rank)
        if "transport" not in json.loads(settings):
            raise Violation("settings that name the transport", settings, rank)
        require_equal(settings, first, what="the settings of rank 0,", rank=rank)
