"""A rank that breaks in every case that it comes to: ``python -m tests.breaking_rank DIRECTORY``, without torch.

Once the variable LOCKSTEP_TEST_SOUND_STARTS names a number of starts, later ones break before they come to any case.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from watch.rank_files import reporting


def main(directory: Path) -> None:
    """Says that it enters the first case that is left, and fails."""
    with reporting(directory, None) as rank:
        (case, *_) = json.loads((directory / "group.json").read_text())["cases"] or ["shutdown"]
        is_sound = len(list(directory.parent.glob("start-*"))) <= int(os.environ["LOCKSTEP_TEST_SOUND_STARTS"])
        with (directory / f"rank{rank}.phases").open("a") as phases:
            phases.write(f"{time.time()} {case if is_sound else 'construct'}\n")
        raise ArithmeticError(f"{case} does not go" if is_sound else "there is no group")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
