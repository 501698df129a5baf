"""Resuming a job: the checkpoint that its nodes go on from, and what they take over from it.

Only rank 0 saves, so that its node alone would find the options of the run: the command that starts the nodes reads
them, too, where it can, and gives all nodes the same.
"""

from __future__ import annotations

from pathlib import Path

from engines.interface import EngineSettings, node_directory
from launch.arguments import Parser
from launch.errors import UsageError
from launch.options import Options, option_words
from launch.resume import LATEST, Start, find_start
from records.config import MOST_ON_A_NODE, RunConfig


def find_start_here(of_training: list[str], output_dir: Path | None) -> Start | None:
    """Finds the checkpoint that the nodes of a job will go on from, if it can be read from this machine.

    Args:
        of_training: The options of the training.
        output_dir: The directory of the job, if the user names one.

    Returns:
        The checkpoint; None if there is none yet, or if none but the nodes can tell.

    Raises:
        Finished: The run has finished.
        UsageError: It cannot be used.
    """
    parser = Parser("", add_help=False)
    parser.add_argument("--resume", nargs="?", const=LATEST)
    resume = parser.parse_known_args(of_training)[0].resume
    if resume is None:
        return None
    try:
        if resume != LATEST and not Path(resume).exists():  # which may be a path of the nodes
            return None
        # Rank 0 is on node 0.
        return find_start(resume, node_directory(output_dir, 0) if output_dir is not None else None)
    except OSError:
        return None


def check_divides(before: RunConfig, num_nodes: int) -> None:
    """Refuses so many nodes if they cannot share the ranks that a run had.

    Raises:
        UsageError: They cannot.
    """
    number = before.num_processes
    if number % num_nodes:
        raise UsageError(
            f"--resume: the run had {number} rank{'s' * (number != 1)}, which {num_nodes} nodes cannot share evenly; "
            "choose their number with --num-processes"
        )


def most_threads(settings: EngineSettings, num_local_processes: int) -> int:
    """Returns how many threads each rank may have on a node: its share of the cores that the engine is asked for."""
    if settings.num_cpus is None:
        return MOST_ON_A_NODE
    return max(1, settings.num_cpus // max(1, num_local_processes))


def inherited_words(options: Options) -> list[str]:
    """Returns what a resumed run takes over from its checkpoint, as the command line has it."""
    values = {
        name: value
        for model in (options.run, options.backend_settings, options.task_settings)
        for name, value in model.model_dump(mode="json", include=set(options.inherited)).items()
    }
    return option_words({name: value for name, value in values.items() if value is not None})
