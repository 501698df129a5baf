"""Made-up standings for the sample of a report. No number here was measured."""

from __future__ import annotations

from compare.results import Claim, Interval, Placing, Standing

HOSTILE = "<script>alert(1)</script>"
ONE_RANK = "1 rank, fp32, batch 32 = 1 x 32 x 1"
TWO_RANKS = "2 ranks, bf16, batch 32 = 2 x 8 x 2"


def sample_standings() -> list[Standing]:
    """Three conditions; the first also has what is possible, and an entrant that is off the scale."""
    first = Standing(
        conditions="bf16, 32 samples a step in 2 parts",
        opponent="ddp, 2 ranks",
        num_starts=4,
        num_turns=48,
        placings=[
            _placing("ddp", 2, 627, None),
            _placing("ddp #2", 2, 624, 0.004, half=0.009),
            _placing("horovod", 2, 489, 0.22, half=0.04),
            _placing(HOSTILE, 2, 190, 2.3, half=0.2),
            _placing("single", 1, 390, 0.61),
            _placing("ddp", 1, 386, 0.63),
            _placing("horovod", 1, 364, 0.72),
        ],
        limits=[
            _placing("single", 2, 741, -0.154, label="2 independent processes"),
            _placing("single", 1, 621, 0.01, label="one process with all cores"),
        ],
    )
    return [
        first,
        _other("fp32, 32 samples a step", 0.28, 0.05),
        _other("fp32, 32 samples a step in 4 parts", 0.31, 0.02),
    ]


def _other(conditions: str, slower: float, half: float) -> Standing:
    placings = [
        _placing("ddp", 2, 515, None),
        _placing("accelerate", 2, 511, 0.008, half=0.02),
        _placing("horovod", 2, 515 / (1 + slower), slower, half=half),
        _placing("single", 1, 546, -0.06),
    ]
    return Standing(
        conditions=conditions,
        opponent="ddp, 2 ranks",
        num_starts=4,
        num_turns=48,
        placings=[one.model_copy(update={"group": f"{one.num_processes}, {conditions}"}) for one in placings],
    )


def _placing(
    backend: str, num_processes: int, rate: float, longer: float | None, half: float = 0.02, label: str = ""
) -> Placing:
    claim: Claim | None = None
    if longer is not None:
        claim = "slower" if longer - half > 0.01 else "faster" if longer + half < -0.01 else "none"
    return Placing(
        label=label or f"{backend}, {num_processes} rank{'s' * (num_processes > 1)}",
        name=backend,
        group=TWO_RANKS if num_processes == 2 else ONE_RANK,
        num_processes=num_processes,
        samples_per_second=Interval(estimate=rate, low=0.98 * rate, high=1.02 * rate),
        longer=None if longer is None else Interval(estimate=longer, low=longer - half, high=longer + half),
        claim=claim,
        detectable=None if longer is None else 0.8 * half,
    )
