"""What the ranks of an entrant send in a step, beside what its gradients need."""

from __future__ import annotations

from compare.steps import Wire
from records import traffic
from records.record import DiagnosisRecord, RunRecord

# Headers of packets are not what a backend chooses to send. With fewer bytes of gradients than this, what enters the
# communication library is judged alone.
_JUDGED_ON_THE_WIRE = 2**20


def needed_bytes(run: RunRecord) -> float:
    """Returns what a rank must send in a step at least, over a ring."""
    seen = _diagnosis(run)
    payload = traffic.Payload(
        seen.gradient_bytes,
        seen.gradient_elements,
        seen.sharded_bytes,
        seen.reduced_bytes[-1] if seen.reduced_bytes else {},
    )
    return traffic.needed_bytes(run.config, payload)


def excess_of(run: RunRecord) -> float | None:
    """Returns how many times what its gradients need a rank sends in a step; None where nobody has counted.

    Bytes are counted where they enter the communication library and, if gradients are large, on the network interface.
    """
    needed = needed_bytes(run)
    if run.config.sync_batchnorm:  # which sends something else besides, as it was asked to
        return None
    if not needed or not _diagnosis(run).reduced_bytes:
        return None
    entered = traffic.sent_bytes(_diagnosis(run).reduced_bytes[-1], len(run.ranks))
    wire = wire_of(run)
    measured = wire.bytes_per_step if wire and wire.gradient_bytes >= _JUDGED_ON_THE_WIRE else 0.0
    return max(entered, measured) / needed if entered or measured else None


def wire_of(run: RunRecord) -> Wire | None:
    """Reads the counters of the network interface; only the traffic of gloo all goes through a known interface."""
    num_ranks = len(run.ranks)
    machines = [rank.diagnosis for rank in run.ranks if rank.diagnosis and rank.diagnosis.sent_bytes]
    if num_ranks == 1 or not machines or run.ranks[0].effective_settings.get("transport") != "gloo":
        return None
    first = machines[0]
    warmup = len(first.num_reductions)  # in these steps, calls are counted, which slows them down
    num_steps = len(run.steps) - warmup
    if num_steps < 1:
        return None
    sent = sum(sum(seen.sent_bytes[warmup:]) for seen in machines if seen.sent_bytes)
    return Wire(
        interface=first.interface,
        bytes_per_step=sent / num_ranks / num_steps,
        gradient_bytes=first.gradient_bytes,
        ring_bound=needed_bytes(run),
        reductions_per_step=float(first.num_reductions[-1]),
    )


def _diagnosis(run: RunRecord) -> DiagnosisRecord:
    diagnosis = run.ranks[0].diagnosis
    assert diagnosis is not None
    return diagnosis
