"""Prints a Markdown table of run records: ``python -m compare.table RECORD.json ...``."""

from __future__ import annotations

import sys
from pathlib import Path

from compare.throughput import samples_per_second
from launch.record import RunRecord, read_record

_COLUMNS = (
    "backend",
    "ranks",
    "precision",
    "micro x accumulation",
    "accuracy",
    "F1",
    "ROC AUC",
    "samples/s",
    "first step (s)",
    "job (s)",
    "weights",
)


def main(paths: list[Path]) -> int:
    """Prints the table, and below it where the runs took place; returns the exit code."""
    if not paths:
        print("usage: python -m compare.table RECORD.json ...", file=sys.stderr)
        return 2
    records = []
    for path in paths:
        try:
            records.append(read_record(path))
        except (OSError, ValueError) as error:
            print(f"lockstep: {path}: not a record ({' '.join(str(error).split())[:200]})", file=sys.stderr)
            return 2
    print("| " + " | ".join(_COLUMNS) + " |")
    print("|" + " --- |" * len(_COLUMNS))
    for record in records:
        print("| " + " | ".join(_row(record)) + " |")
    for place in dict.fromkeys(_place(record) for record in records):
        print(f"\n{place}")
    return 0


def _row(record: RunRecord) -> list[str]:
    config = record.config
    if record.status == "failed":
        return [str(config["backend"]), f"failed: {record.error}", *[""] * (len(_COLUMNS) - 2)]
    metrics = [record.quality.get(name) for name in ("accuracy", "f1", "roc_auc")]
    rate = samples_per_second(record)
    return [
        str(config["backend"]),
        str(config["num_processes"]),
        str(config["precision"]),
        f"{config['micro_batch_size']} x {record.gradient_accumulation_steps}",
        *["-" if metric is None else f"{metric:.4f}" for metric in metrics],
        "-" if rate is None else f"{rate:.0f}",
        "-" if record.seconds_to_first_step is None else f"{record.seconds_to_first_step:.1f}",
        f"{record.seconds:.0f}",
        f"`{record.ranks[0].weights_sha256[:8]}`",
    ]


def _place(record: RunRecord) -> str:
    environment = record.environment
    packages = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
    machine = ", ".join(environment.gpus) or f"{environment.num_cpus} x {environment.cpu}"
    return f"{machine}; Python {environment.python}; {packages}; commit {(environment.git_commit or 'unknown')[:12]}"


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
