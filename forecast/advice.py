"""Advice: what would raise the efficiency of a training, and to how much."""

from __future__ import annotations

import math
from collections.abc import Iterator

from backends.registry import BACKENDS
from forecast.scenario import Scenario, Variant
from forecast.sending import Buckets, Fusion, Whole

# Less is not worth a word, and cannot be told from the error of the model.
_SMALLEST_GAIN = 0.01
_MOST = 4
_ACCUMULATIONS = (2, 4, 8)
# The largest first, since a smaller one has to gain more. A race that tunes tries fewer, since each takes it minutes.
_BUCKET_MEBIBYTES = (100, 5, 1, 0.5)
_CYCLES_MILLISECONDS = (0.1, 5)


def advice(scenario: Scenario, variant: Variant, num_ranks: int) -> list[str]:
    """Returns what would help most, on so many ranks, the best of each kind first.

    Args:
        scenario: The training and the network.
        variant: How it communicates.
        num_ranks: The number of ranks.
    """
    now = scenario.efficiency(variant, num_ranks)
    best: dict[str, tuple[float, str]] = {}
    for kind, words, other in _others(scenario, variant, num_ranks):
        then = scenario.efficiency(other, num_ranks)
        if then >= max(now + _SMALLEST_GAIN, best.get(kind, (0.0, ""))[0] + _SMALLEST_GAIN):
            best[kind] = (then, words)
    ordered = sorted(best.values(), reverse=True)[:_MOST]
    return [
        f"{words}: efficiency {100 * now:.0f} % becomes {100 * then:.0f} % on {num_ranks:,} ranks"
        for then, words in ordered
    ]


def _others(scenario: Scenario, variant: Variant, num_ranks: int) -> Iterator[tuple[str, str, Variant]]:
    """Yields what could be done otherwise: of which kind it is, in words, and as a variant.

    Another algorithm is not among it, since libraries choose their own by the size of what they send.
    """
    profile = scenario.profile
    micro_batch_size = math.ceil(profile.samples_per_rank / profile.micro_steps)
    for times in _ACCUMULATIONS:
        size = times * num_ranks * profile.samples_per_rank
        words = f"--global-batch-size {size} --micro-batch-size {micro_batch_size} ({times} times the batch)"
        yield "accumulation", words, variant._replace(accumulation=times)
    for name in profile.compressions:
        yield "compression", f"--grad-compression {name}", variant._replace(share=0.5)
    match variant.sending:
        case Buckets():
            row = BACKENDS.get(profile.backend)
            has_option = row is not None and "bucket_cap_mb" in row.settings.model_fields
            for mebibytes in _BUCKET_MEBIBYTES:
                num_bytes = round(mebibytes * 2**20)
                buckets = Buckets(first_bytes=num_bytes, bucket_bytes=num_bytes)
                words = f"--bucket-cap-mb {mebibytes:g}" if has_option else f"buckets of {mebibytes:g} MiB"
                yield "sending", words, variant._replace(sending=buckets)
        case Fusion(buffer_bytes=buffer_bytes):
            for cycle in _CYCLES_MILLISECONDS:
                fusion = Fusion(buffer_bytes=buffer_bytes, cycle_seconds=1e-3 * cycle)
                yield "sending", f"HOROVOD_CYCLE_TIME={cycle:g}", variant._replace(sending=fusion)
        case Whole():
            yield "sending", "sending in buckets during the backward pass", variant._replace(sending=Buckets())
