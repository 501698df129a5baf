"""What is asked of a backend's ranks, whichever machine they are on."""

from __future__ import annotations

from backends.capabilities import UnsupportedError
from backends.registry import BackendRow
from launch.errors import UsageError
from launch.nodes import Nodes
from launch.starters.interface import Starter
from launch.starters.registry import settle_starter
from records.config import RunOptions


def check_world(
    backend: str, row: BackendRow, options: RunOptions, *, device: str, num_processes: int, nodes: Nodes
) -> Starter:
    """Checks that a backend supports what is asked of so many ranks, and returns what starts them.

    Args:
        backend: The backend.
        row: Its row in the registry.
        options: The options of the run.
        device: "cpu" or "cuda".
        num_processes: The number of ranks on all nodes together.
        nodes: The nodes.

    Raises:
        UsageError, UnsupportedError: It does not, or nodes cannot share the ranks evenly.
    """
    row.capabilities.check(
        name=backend,
        device=device,
        precision=options.precision,
        world_size=num_processes,
        find_unused_parameters=options.find_unused_parameters,
        grad_compression=options.grad_compression,
    )
    if options.grad_compression != "none" and num_processes == 1:
        raise UnsupportedError(
            f"--grad-compression {options.grad_compression}: one rank sends no gradients; "
            "leave the option out, or use more ranks"
        )
    starter = settle_starter(backend, row.capabilities.start_methods, options.start_method, device=device, nodes=nodes)
    if num_processes % nodes.num_nodes:
        raise UsageError(
            f"--num-processes {num_processes} is not a multiple of --num-nodes {nodes.num_nodes}; "
            f"choose a multiple of {nodes.num_nodes}"
        )
    return starter
