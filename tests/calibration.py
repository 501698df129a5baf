"""Real runs for trying the statistics on: ``python -m tests.calibration DIRECTORY`` races DDP against itself.

Three entrants in each block: DDP, the same again, and one that sleeps for a tenth of each step. The
seconds of all runs go to docs/results/, where tests draw races from them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from compare.race.directory import RaceDirectory
from compare.report.reading import read_run
from compare.report.words import machine_of, software_of
from launch.engines.interface import PROJECT_DIRECTORY
from records.throughput import training_seconds

ENTRANTS = {"ddp": "ddp", "same": "tests.variants_of_ddp:SameDDP", "slowed": "tests.variants_of_ddp:SlowedDDP"}
NUM_BLOCKS = 12
OPTIONS = ["--no-collectives", "--timed-steps=60", f"--repeats={NUM_BLOCKS}"]


def main(directory: Path) -> int:
    """Races, or goes on with a race, and writes what it measured; returns the exit code."""
    backends = ",".join(ENTRANTS.values())
    command = ["launch/run.sh", "compare", f"--backends={backends}", *OPTIONS]
    race = [sys.executable, "-m", "launch", *command[1:], f"--output-dir={directory}"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_DIRECTORY)}
    done = subprocess.run(race, cwd=PROJECT_DIRECTORY, env=environment)
    if done.returncode:
        return done.returncode
    seconds: dict[str, dict[int, float]] = {name: {} for name in ENTRANTS}
    names = {backend: name for name, backend in ENTRANTS.items()}
    for path in RaceDirectory(directory).records():
        run = read_run(path)
        if run.race is not None and run.purpose == "timed":
            last = run.record
            step_seconds = training_seconds(last) / len(last.steps)
            seconds[names[last.config.backend]][run.race.block] = step_seconds
    found = {
        "command": " ".join(command),
        "machine": machine_of(last),
        "software": software_of(last),
        "seconds_per_step": {name: [blocks[block] for block in sorted(blocks)] for name, blocks in seconds.items()},
    }
    target = PROJECT_DIRECTORY / "docs" / "results" / f"calibration-{time.strftime('%Y-%m-%d')}.json"
    target.write_text(json.dumps(found, indent=1) + "\n")
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
