"""`accelerate launch --cpu --num_processes=2` starts one process and says nothing about it.

    python docs/findings/accelerate_launch_cpu.py

Starts itself under the launcher, with --cpu and in a way that works: told of GPUs, and kept off them.
"""

import os
import subprocess
import sys
import tempfile

SPELLED_OUT = ("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")  # or it warns of its defaults


def ranks_started(*options: str) -> int:
    """Runs this file under the launcher, away from any configuration file, and counts its ranks."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    with tempfile.TemporaryDirectory() as home:
        run = subprocess.run(
            [sys.executable, "-m", "accelerate.commands.launch", *options, *SPELLED_OUT, __file__, "as-a-rank"],
            env=clean | {"HF_HOME": home, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
    print(f"{' '.join(options)}: {sorted(run.stdout.splitlines())}, on stderr: {run.stderr!r}")
    return len(run.stdout.splitlines())


if sys.argv[1:] == ["as-a-rank"]:
    print(f"rank {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}")
else:
    with_cpu = ranks_started("--cpu", "--num_processes=2")
    with_gpus = ranks_started("--multi_gpu", "--num_processes=2", "--main_process_port=0")
    as_described = (with_cpu, with_gpus) == (1, 2)
    print("as described" if as_described else "changed: expected 1 rank with --cpu, 2 with --multi_gpu")
    sys.exit(0 if as_described else 1)
