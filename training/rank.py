"""The program of each rank: ``python -m training.rank RUN_DIRECTORY [RANK_VARIABLE]``, started N times by a starter.

The run directory holds the resolved configuration. Everything that a rank prints goes to its own log there. A rank
that fails writes its error beside the log, for the launcher to report.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from records.config import RunConfig
from records.names import CONFIG_NAME
from training.clock import ProcessorClock
from training.scheduling import bind_to_cores, schedule_as_batch
from watch.heartbeat import Heartbeat
from watch.rank_files import RankFiles, reporting


class RankStart(NamedTuple):
    """What a rank has before it joins the others.

    Attributes:
        config: The resolved configuration of the run.
        directory: The directory of the run.
        rank: The number of this rank, as its starter gave it.
        heartbeat: The heartbeat of this rank.
        clock: Its second clock, opened when its process began.
    """

    config: RunConfig
    directory: Path
    rank: int
    heartbeat: Heartbeat
    clock: ProcessorClock


class Work(Protocol):
    """The work of a rank."""

    def run(self) -> None:
        """Does the work to its end."""


def main(run_directory: str, rank_variable: str | None = None) -> None:
    """Runs this rank to its end; on an error, exits with code 1 at once."""
    run_rank(run_directory, rank_variable, _training)


def load_libraries(run_directory: str, rank_variable: str | None = None) -> None:
    """Imports what this program would import first, for a starter whose ranks are copies of one process."""
    from training.rank_work import load_libraries as load

    load(_config(Path(run_directory)))


def _config(run_directory: Path) -> RunConfig:
    return RunConfig.model_validate_json((run_directory / CONFIG_NAME).read_bytes())


def _training(start: RankStart) -> Work:
    from training.rank_work import RankWork

    return RankWork(start)


def run_rank(run_directory: str, rank_variable: str | None, make_work: Callable[[RankStart], Work]) -> None:
    """Runs this rank to its end; on an error, exits with code 1 at once.

    Args:
        run_directory: The directory of the run.
        rank_variable: The environment variable in which the starter passes the rank; None for rank 0.
        make_work: Makes the work of this rank; what it imports is imported before garbage is collected.
    """
    directory = Path(run_directory)
    with reporting(directory, rank_variable) as rank:
        clock = ProcessorClock()  # before the libraries start threads
        heartbeat = Heartbeat(RankFiles(directory, rank).heartbeat)
        config = _config(directory)
        if config.bind_ranks:
            bind_to_cores(rank, config)
        if config.scheduling == "batch":
            schedule_as_batch()
        # Collecting garbage among the objects that large imports create would take half a second of them.
        gc.disable()
        make_work(RankStart(config, directory, rank, heartbeat, clock)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
