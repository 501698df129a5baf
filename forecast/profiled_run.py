"""A run whose ranks are profiled: ``python -m forecast.profiled_run BACKEND OPTIONS``."""

from __future__ import annotations

import sys

from launch.cli import answer
from launch.train_command import train

if __name__ == "__main__":
    sys.exit(answer(lambda: train(sys.argv[1], sys.argv[2:], rank_program=("forecast.rank",))))
