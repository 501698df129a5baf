"""The table of a campaign, in Markdown, made from its raw numbers."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

from compare.report.flops import model_flops_per_second, peak_flops_per_second
from records.record import RunRecord
from records.throughput import NUM_WARMUP_STEPS, samples_per_second, training_seconds

_COLUMNS = (
    *("competitor", "runs", "samples/s", "step (ms)", "first step (s)", "peak memory (MiB)"),
    *("model TFLOP/s", "MFU by data sheet", "by measured matmul"),
)


def render(results: dict[str, Any]) -> str:
    """Makes the page of one campaign."""
    environment = results["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    lines = [
        f"# {results['machine']}, {results['date']}",
        "",
        f"`{results['command']}`, {results['seconds']:.0f} s. Python {environment['python']}, {packages}, "
        f"CUDA {environment['cuda']}, NCCL {environment['nccl']}, driver {results['driver']}, "
        f"commit {(environment['git_commit'] or 'unknown')[:12]}{' with changes' if environment['git_dirty'] else ''}.",
        "",
        "## Contract",
        "",
        "| adapter | passed | failed | others | seconds |",
        "| --- | --- | --- | --- | --- |",
        *(_contract_row(contract) for contract in results["contracts"]),
        "",
        "## Race",
        "",
        *_race(results),
    ]
    return "\n".join(lines) + "\n"


def _contract_row(contract: dict[str, Any]) -> str:
    if "checks" not in contract:
        return f"| {contract['adapter']} | | | {contract.get('unavailable') or 'it broke: ' + contract['broken']} | |"
    counts = Counter(contract["checks"].values())
    failed = ", ".join(contract["failures"]) or "0"
    others = ", ".join(f"{count} {state}" for state, count in counts.items() if state not in ("passed", "failed"))
    return f"| {contract['adapter']} | {counts['passed']} | {failed} | {others} | {contract['seconds']:.0f} |"


def _race(results: dict[str, Any]) -> list[str]:
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:  # one that failed while it was compiled, too
        runs.setdefault(run["entry"], []).append(run)
    if not runs:
        return ["Nothing was raced."]
    peaks = results["matmul_flops_per_second"]
    lines = [
        "One rank; medians over the runs of a competitor, the first "
        f"{NUM_WARMUP_STEPS} steps of each left out. Measured matrix products: "
        + ", ".join(f"{precision} {rate / 1e12:.1f} TFLOP/s" for precision, rate in peaks.items() if rate)
        + ".",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + " --- |" * len(_COLUMNS),
        *(_race_row(entry, some, results) for entry, some in runs.items()),
    ]
    if results["left_out"]:
        lines += ["", f"Not run, for want of time: {'; '.join(results['left_out'])}."]
    return lines


def _race_row(entry: str, runs: list[dict[str, Any]], results: dict[str, Any]) -> str:
    records = [RunRecord.model_validate(run["record"]) for run in runs if run["record"]["status"] == "completed"]
    if not records:
        return f"| {entry} | failed: {' '.join(str(runs[0]['record']['error']).split())[-300:]} |" + " |" * 7
    rate = median(samples_per_second(record) or 0 for record in records)
    step = median(training_seconds(record) / len(record.ranks[0].step_seconds[NUM_WARMUP_STEPS:]) for record in records)
    memory = max(rank.peak_cuda_memory_bytes or rank.peak_memory_bytes for record in records for rank in record.ranks)
    flops = median(model_flops_per_second(record) or 0 for record in records)
    peak = peak_flops_per_second(results["machine"], runs[0]["precision"])
    shares = [peak, results["matmul_flops_per_second"].get(runs[0]["precision"])]
    cells = [
        *(entry, str(len(records)), f"{rate:.1f}", f"{1000 * step:.1f}"),
        f"{median(record.seconds_to_first_step or 0 for record in records):.1f}",
        *(f"{memory / 2**20:.0f}", f"{flops / 1e12:.2f}"),
        *("-" if share is None else f"{flops / share:.1%}" for share in shares),
    ]
    return "| " + " | ".join(cells) + " |"
