"""The program of each rank of a peer: ``python -m compare.race.peers.rank ADDRESS RUN_DIRECTORY [RANK_VARIABLE]``.

The address is the path of the race's socket, or "-" for a rank that trains without resting.
"""

from __future__ import annotations

import sys
from pathlib import Path

from records.config import RunConfig
from records.names import CONFIG_NAME
from training.clock import ProcessorClock
from watch.heartbeat import Heartbeat
from watch.rank_files import RankFiles, reporting


def main(address: str, run_directory: str, rank_variable: str | None = None) -> None:
    """Runs this rank to its end; on an error, exits with code 1 at once."""
    directory = Path(run_directory)
    with reporting(directory, rank_variable) as rank:
        clock = ProcessorClock()  # before the libraries start threads
        heartbeat = Heartbeat(RankFiles(directory, rank).heartbeat)
        config = RunConfig.model_validate_json((directory / CONFIG_NAME).read_bytes())
        from compare.race.peers.work import run_peer

        run_peer(config, rank, address, heartbeat, clock)


if __name__ == "__main__":
    main(*sys.argv[1:])
