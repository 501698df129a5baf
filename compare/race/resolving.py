"""What a run of a race is once its options are settled, which shows whether it can start here."""

from __future__ import annotations

import time

from backends.registry import find_backend
from compare.race.peers.table import PEERS, check_peer
from compare.race.plan import PlannedRun, RacePlan
from launch.options import read_options
from launch.resolve import resolve
from records.config import RunConfig


def resolve_run(plan: RacePlan, run: PlannedRun) -> RunConfig:
    """Returns the configuration of a run.

    Raises:
        UsageError, UnsupportedError, TaskInputError: It cannot be made.
    """
    name, is_peer = run.entrant.backend, run.entrant.role == "peer"
    row = PEERS[name].row if is_peer else find_backend(name)
    asked = read_options(name, row.settings, plan.arguments(run, here=True)[1:])
    resolved = resolve(name, row, asked, started_at=time.time())
    if is_peer:
        check_peer(name, resolved.task, resolved.config)
    return resolved.config
