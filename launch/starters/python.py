"""Starts a single rank with Python itself."""

from __future__ import annotations

import sys

from typing_extensions import override

from launch.starters.interface import Ranks, Starter


class Python(Starter):
    """``python -m MODULE``."""

    name = "python"
    takes_port = False

    @override
    def command(self, ranks: Ranks) -> list[str]:
        return [sys.executable, "-m", *self.program(ranks)]
