"""Which starts a report counts, for every form of it: those of peers and of races in several parts, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from compare.report.disturbed import leave_out_disturbed
from compare.report.grouping import EntrantRuns, group_runs
from compare.report.headings import ordered_groups
from compare.report.machines import located
from compare.report.parts import as_one_part
from compare.report.runs import Run

_PEER = "peer"


class Counted(NamedTuple):
    """The runs of a report, and which of them count.

    Attributes:
        runs: All runs with their machines, as if those of a block had all raced in one part.
        groups: The entrants of each group but for peers, which draw their own batches and are compared apart.
        peers: The peers of each group.
        disturbed: A sentence about each start that is left out.
    """

    runs: list[Run]
    groups: list[list[EntrantRuns]]
    peers: list[list[EntrantRuns]]
    disturbed: list[str]


def counted(runs: Sequence[Run]) -> Counted:
    """Groups the runs of a report, and leaves out the starts that other programs disturbed."""
    in_one_part = located(as_one_part(runs))
    groups = ordered_groups(without_peers(in_one_part))
    peers = group_runs([run for run in in_one_part if run.role == _PEER])
    # Peers take turns with the others: a start counts for all of them or for none, and all keep those that they need.
    return Counted(in_one_part, groups, peers, leave_out_disturbed([*groups, *peers]))


def without_peers(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs of all entrants that are not peers."""
    return [run for run in runs if run.role != _PEER]
