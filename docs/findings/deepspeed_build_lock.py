"""On CPUs, DeepSpeed builds a library when ranks meet, and waits without end for a build that somebody has killed.

    python docs/findings/deepspeed_build_lock.py

One rank starts where an earlier build was killed: all that this leaves behind is an empty file of the name `lock`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# A rank that has not met anybody after 45 seconds says where it is, and ends.
PROGRAM = "import faulthandler; faulthandler.dump_traceback_later(45, exit=True); import deepspeed; "
PROGRAM += "deepspeed.init_distributed('gloo'); print('met')"
WORLD = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

with tempfile.TemporaryDirectory() as directory:
    build = Path(directory) / "deepspeed_shm_comm"
    build.mkdir()
    (build / "lock").touch()
    environment = os.environ | WORLD | {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1", "TORCH_EXTENSIONS_DIR": directory}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

waits_for_build = "torch/utils/file_baton.py" in done.stderr
print(f"after 45 s: {'the rank waits for the build' if waits_for_build else done.stdout.strip()[-200:]}")
print("as described" if waits_for_build else "changed: expected it to wait (which takes a C++ compiler and ninja)")
sys.exit(0 if waits_for_build else 1)
