"""What a dry run says that a rank takes, beside what ranks take: ``python -m tests.sizes`` prints a table.

The parts of the memory and what is sent are those of the record of a training, and the files are those that it has
written. The tensors of a rank at its peak, and its resident memory, are those of ranks that take the same steps in a
real group.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from launch.dry_run import measure_in_a_process
from launch.starters.interface import PROJECT_DIRECTORY
from records.checkpoint import list_checkpoints
from records.config import RunConfig
from records.names import CONFIG_NAME
from records.run_files import model_files
from records.sizes import SIZES_NAME, RankSizes
from records.traffic import sent_bytes
from tests.launching import train
from training import sizes

CASES = (
    *product(("ddp", "fsdp2"), ("bert-tiny", "bert-small"), (2, 4)),
    *product(("accelerate", "fabric", "deepspeed"), ("bert-small",), (2,)),
)
# A checkpoint after the first step; the last one leaves none.
OPTIONS = ("--max-steps", "2", "--threads-per-rank", "1", "--save-every", "1", "--no-evaluate")
_PARTS = ("parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")


class Size(NamedTuple):
    """What a dry run says and what was found, in bytes."""

    name: str
    estimate: int
    found: int

    @property
    def excess(self) -> float:
        """How much larger the estimate is, as a share of what was found."""
        return self.estimate / self.found - 1 if self.found else float(bool(self.estimate))


def compare(backend: str, num_ranks: int, directory: Path, *options: str) -> Iterator[Size]:
    """Trains, and takes the steps of a dry run in a real group."""
    run, words = directory / "run", (*OPTIONS, "--num-processes", str(num_ranks), *options)
    record = train(backend, run, *words, "--diagnose")
    # Activations in a record are those of the first step, so a dry run of this step alone is compared with it.
    of_first_step = {"diagnose": False, "max_steps": 1}
    config = RunConfig.model_validate(record["config"]).model_copy(update=of_first_step)
    estimate = measure_in_a_process(config).sizes
    assert estimate is not None
    for name in _PARTS:
        most = max(rank["memory"][name] for rank in record["ranks"])
        yield Size(name, getattr(estimate.memory, name), most)
    assert estimate.entered is not None
    counted = record["ranks"][0]["diagnosis"]["reduced_bytes"][0]
    yield Size("sent_bytes", round(sent_bytes(estimate.entered, num_ranks)), round(sent_bytes(counted, num_ranks)))
    (checkpoint,) = list_checkpoints(run)
    yield Size("checkpoint_bytes", estimate.checkpoint_bytes, checkpoint.stat().st_size)
    yield Size("model_bytes", estimate.model_bytes, sum((run / name).stat().st_size for name in model_files(run)))
    ranks = _real_ranks(config, directory)
    yield Size("peak_bytes", estimate.peak_bytes, max(rank.peak_bytes for rank in ranks))
    yield Size("resident_bytes", estimate.resident_bytes, max(rank.resident_bytes for rank in ranks))


def _real_ranks(config: RunConfig, directory: Path) -> list[RankSizes]:
    """Has ranks of a real group take the steps of a dry run; returns what each took."""
    places = [directory / f"rank{rank}" for rank in range(config.num_processes)]
    for place in places:
        place.mkdir()
        (place / CONFIG_NAME).write_text(config.model_dump_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(places)}"]
    done = subprocess.run(
        [*command, "-m", "tests.sizes", str(directory)],
        env={**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [RankSizes.model_validate_json((place / SIZES_NAME).read_bytes()) for place in places]


def _be_a_real_rank(directory: Path) -> None:
    """Takes the steps in the group that torchrun describes."""
    sizes.join_pretended = lambda num_processes: None
    sizes.main(str(directory / f"rank{os.environ['RANK']}"))


def main() -> None:
    print(f"{'':31} {'part':16} {'dry run':>12} {'found':>12}  excess")
    for backend, model, num_ranks in CASES:
        with tempfile.TemporaryDirectory() as name:
            for size in compare(backend, num_ranks, Path(name), "--model", model):
                case = f"{backend}, {model}, {num_ranks} ranks"
                print(f"{case:31} {size.name:16} {size.estimate:12,} {size.found:12,} {size.excess:+7.1%}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _be_a_real_rank(Path(sys.argv[1]))
    else:
        main()
