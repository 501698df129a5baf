"""Made-up peers for tests/sample_results.py. No number here was measured."""

from __future__ import annotations

from compare.results import Claim, Interval, PeerComparison, PeerRow


def sample_peers(group: str, hostile: str) -> PeerComparison:
    """Builds a comparison of peers; `hostile` is the name of one of them."""
    faster = Interval(estimate=0.62, low=0.58, high=0.66)
    return PeerComparison(
        group=group,
        opponent="ddp",
        num_starts=3,
        num_epochs=1,
        rows=[
            _peer("ddp", 9400, None, accuracy=0.91),
            _peer("transformers.Trainer", 5800, faster, accuracy=0.905),
            _peer(hostile, 9300, Interval(estimate=0.01, low=-0.01, high=0.03), accuracy=None),
            PeerRow(
                name="Lightning Fabric",
                failures=["rank 1 ended by SIGKILL (records/timed-001)"],
                tokens_per_second=None,
                positions_per_token=None,
                longer=None,
                claim="too few",
                metrics={},
            ),
        ],
    )


def _peer(name: str, rate: float, longer: Interval | None, *, accuracy: float | None) -> PeerRow:
    claim: Claim | None = None
    if longer is not None:
        claim = "slower" if longer.estimate > 0.1 else "none"
    return PeerRow(
        name=name,
        failures=[],
        tokens_per_second=Interval(estimate=rate, low=0.98 * rate, high=1.02 * rate),
        positions_per_token=1.9,
        cpu_seconds_per_token=1.8 / rate,
        instructions_per_token=5e8 / rate,
        longer=longer,
        claim=claim,
        metrics={"accuracy": accuracy},
    )
