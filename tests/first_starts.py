"""What a backend takes where nothing is installed: ``python -m tests.first_starts BACKEND``.

It is set up into an environment and a cache of its own, which are removed afterwards, and then trains for two steps of
the default task, three times. The set-up depends on how fast packages arrive.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from backends.registry import BACKENDS
from launch.starters.interface import PROJECT_DIRECTORY
from tests.starts import cpu_seconds

NUM_STARTS = 3


def main(arguments: Sequence[str]) -> None:
    """Sets a backend up, starts it, and prints what both took."""
    parser = argparse.ArgumentParser(prog="python -m tests.first_starts", description=__doc__)
    parser.add_argument("backend", choices=sorted(BACKENDS))
    backend: str = parser.parse_args(arguments).backend
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        environment = {**os.environ, "LOCKSTEP_VENV": str(place / "venv"), "LOCKSTEP_CACHE": str(place / "cache")}
        script = shlex.quote(str(PROJECT_DIRECTORY / "launch" / "setup.sh"))
        set_up = f"source {script} && set_up {backend}"
        begin, before = time.monotonic(), cpu_seconds()
        subprocess.run(["bash", "-c", set_up], env=environment, check=True)
        cpu = cpu_seconds() - before
        size = sum(path.stat().st_size for path in (place / "venv").rglob("*") if path.is_file())
        print(f"{backend}: set up in {time.monotonic() - begin:.0f} s ({cpu:.0f} CPU seconds), {size / 2**30:.2f} GiB")
        for number in range(NUM_STARTS):
            run = place / f"run-{number}"
            options = ["--max-steps", "2", "--no-evaluate", "--output-dir", str(run)]
            command = [str(PROJECT_DIRECTORY / "launch" / "run.sh"), backend, *options]
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
            record = json.loads((run / "record.json").read_bytes())
            print(f"start {number + 1}: {record['seconds_to_first_step']:.1f} s to the end of the first step")


if __name__ == "__main__":
    main(sys.argv[1:])
