"""Where the commands run, what they leave there, and what they say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.forked.client import ForkedJob

LOCKSTEP = Path(sys.executable).with_name("lockstep")


@dataclass(frozen=True)
class Place:
    """Where commands run.

    Attributes:
        work: The working directory, with the input files; nothing in it may change.
        cache: LOCKSTEP_CACHE; it may get lock files, nothing else.
        packages: The directories of PACKAGES.
        environment: The environment of every command.
    """

    work: Path
    cache: Path
    packages: Path
    environment: dict[str, str]

    @contextmanager
    def untouched(self) -> Iterator[None]:
        before = content_of(self.work), content_of(self.cache)
        yield
        assert (content_of(self.work), content_of(self.cache)) == before


@dataclass(frozen=True)
class Outcome:
    exit_code: int | str | None
    stdout: str
    stderr: str

    def assert_refused(self, *fragments: str) -> None:
        assert self.exit_code == 2, self.stderr
        assert self.stdout == ""
        assert self.stderr.startswith("lockstep: ")
        assert self.stderr.endswith("\n")
        assert len(self.stderr.splitlines()) == 1, self.stderr
        for fragment in fragments:
            assert fragment in self.stderr


def content_of(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if path.suffix != ".lock"
    }


def run(place: Place, *command: str | Path, **environment: str) -> Outcome:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=place.work,
        env=place.environment | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def run_forked(place: Place, *arguments: str) -> Outcome:
    """The command line in a process that has loaded all libraries already."""
    job = ForkedJob(list(arguments), environment=place.environment, directory=place.work)
    output, errors = job.communicate(timeout=120)
    return Outcome(job.returncode, output, errors)
