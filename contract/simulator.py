"""Computes simulations in a process that is started in the same way as a rank: ``python -m contract.simulator``.

A comparison bit for bit needs the same number of threads and the same kernels on both sides. The process that judges
has the environment of the user's shell and uses all cores; both determine which kernels run and where they divide a
tensor. The simulation therefore runs in a process of its own, with the environment and the threads of a rank. It
serves one request after the other until its standard input is closed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch

from backends.capabilities import Signs
from contract.reference import Arithmetic, Reference, Tensors, simulate
from launch.job import compose_job
from launch.starters.interface import PROJECT_DIRECTORY, Ranks
from launch.starters.python import Python
from records.config import RunConfig

# Keyed by what is computed: adapters that begin with the same weights share a simulation.
_SIMULATIONS: dict[str, Reference] = {}


def simulate_as_a_rank(initial: Tensors, config: RunConfig, arithmetic: Arithmetic) -> Reference:
    """Calls `contract.reference.simulate` with the threads and the environment of a rank.

    Raises:
        RuntimeError: The simulation failed.
    """
    key = key_of(initial, config, arithmetic._asdict())
    if key not in _SIMULATIONS:
        process = _process(config.device)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((initial, config, arithmetic), process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            _process.cache_clear()  # the next simulation starts another
            process.kill()
            raise RuntimeError(f"the process that simulates has ended with exit code {process.wait()}") from error
        if isinstance(answer, str):
            raise RuntimeError(f"the simulation failed: {answer}")
        _SIMULATIONS[key] = answer
    return _SIMULATIONS[key]


def key_of(initial: Tensors, config: RunConfig, options: dict[str, Any]) -> str:
    """Returns a digest of everything that a training depends on: its initial weights, bit for bit, and its options."""
    digest = hashlib.sha256(config.model_copy(update={"started_at": 0.0}).model_dump_json().encode())
    digest.update(repr(options).encode())
    for name, tensor in sorted(initial.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@functools.cache
def _process(device: str) -> subprocess.Popen[bytes]:
    """Starts the process; it ends with this one, which holds the other end of its standard input."""
    job = compose_job(Python(), Ranks(1, (__name__,), device, 1, None, 0.0, Path()), Path(), Signs())
    return subprocess.Popen(
        job.command,
        env=job.environment,
        cwd=PROJECT_DIRECTORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            initial, config, arithmetic = pickle.load(requests)
        except EOFError:
            return
        answer: Reference | str
        try:
            answer = simulate(initial, config, arithmetic)
        except Exception as error:  # the other process reports it
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as to_parent:
        os.dup2(2, 1)  # what a library prints must not get among the answers
        _serve(sys.stdin.buffer, to_parent)
