"""Horovod's stall inspector never speaks with the Gloo controller.

    horovodrun -np 2 --gloo --network-interfaces lo python docs/findings/horovod_stall_inspector.py

Rank 1 comes 12 seconds late to an all-reduce. Horovod is told to warn after 2 seconds and to give
up after 4; rank 0 notes what it says on stderr in the meantime, and how the all-reduce ends.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "2"
os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "4"
hvd.init()
said = Path(tempfile.mkstemp()[1])
os.dup2(os.open(said, os.O_WRONLY), sys.stderr.fileno())

began = time.monotonic()
if hvd.rank() == 1:
    time.sleep(12)
try:
    hvd.allreduce(torch.ones(1), name="late")
    outcome = "succeeded"
except HorovodInternalError:
    outcome = "was given up"
as_described = outcome == "succeeded" and "stall" not in said.read_text().lower()
if hvd.rank() == 0:
    print(f"rank 0 waited {time.monotonic() - began:.0f} s, then the all-reduce {outcome}")
    print(f"on stderr meanwhile: {said.read_text()!r}")
    print("as described" if as_described else "changed: the stall was noticed")
said.unlink()
sys.exit(0 if as_described else 1)
