"""What each command prints with --help: ``python -m tests.help_texts`` writes it into docs/help.

launch/run.sh shows these files where nothing has been set up yet. The options of a backend without any of its own
are those of all backends, in one file. Those of an engine are in a file of its own.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from backends.registry import BACKENDS
from engines.registry import ENGINES
from launch.cli import COMMANDS
from launch.starters.interface import PROJECT_DIRECTORY

DIRECTORY = PROJECT_DIRECTORY / "docs" / "help"
_ANY_BACKEND = "BACKEND"


def help_text(*words: str) -> str:
    """What a command prints with --help on a terminal of 100 columns."""
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words, "--help"],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@functools.cache
def help_texts() -> dict[str, str]:
    """All files by name."""
    texts = {command: help_text(command) for command in COMMANDS}
    texts["forecast-profile"] = help_text("forecast", "profile")
    of_backends = {name: help_text(name) for name in BACKENDS}
    plain = {name: text.replace(name, _ANY_BACKEND, 1) for name, text in of_backends.items()}
    common = min(plain.values(), key=len)
    any_backend = min(plain, key=lambda name: len(plain[name]))
    for engine in ENGINES:
        texts[f"engine-{engine}"] = help_text(any_backend, "--engine", engine).replace(any_backend, _ANY_BACKEND)
    texts |= {name: text for name, text in of_backends.items() if plain[name] != common}
    return {f"{name}.txt": text for name, text in {**texts, _ANY_BACKEND: common}.items()}


def main() -> None:
    """Replaces the files."""
    texts = help_texts()  # first, so that an interruption removes nothing
    DIRECTORY.mkdir(exist_ok=True)
    for path in DIRECTORY.iterdir():
        path.unlink()
    for name, text in texts.items():
        Path(DIRECTORY / name).write_text(text)


if __name__ == "__main__":
    main()
