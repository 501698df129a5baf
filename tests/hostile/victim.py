"""The command line as a victim: called in this process with hostile input, and examined for what it did."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from launch import cli, train_command
from records.checkpoint import checkpoint_path
from tests.launching import train

ROWS = "text,label\n" + "".join(f"{word} film {n},{n % 2}\n" for n, word in enumerate(["good", "bad"] * 8))
# How much more memory one input may take than the ones before it, and how long it may be looked at.
_MOST_BYTES = 3 * 2**30
_MOST_SECONDS = 60.0


class Broken(AssertionError):
    """The command line did something else than refuse in one line."""


@dataclass
class Tally:
    """How many inputs of each family were tried, and how many of them turned out to be usable."""

    tried: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        families = {name: {"tried": self.tried[name], "usable": self.accepted[name]} for name in sorted(self.tried)}
        malformed = sum(self.tried.values()) - sum(self.accepted.values())
        return {"malformed": malformed, "refused_in_one_line": malformed, "families": families}


class Victim:
    """A place with valid inputs, to be made invalid, and the command line beside it.

    Attributes:
        root: Holds rows.csv, model/, run/ (a whole run with checkpoints), and what cases add under input/.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tally = Tally()
        (root / "rows.csv").write_text(ROWS)
        self.run = root / "run"
        self.model = root / "model"
        options = ("--task", "token-tagging", "--max-steps", "6", "--save-every", "2")
        train("single", self.run, *options)
        self.checkpoint = checkpoint_path(self.run, 4)
        _save_small_model(self.model)

    def attack(self, family: str, *arguments: str, canary: Path | None = None) -> bool:
        """Calls the command; returns whether it refused (else it found the input usable).

        Raises:
            Broken: It neither refused in one line nor accepted.
        """
        self.tally.tried[family] += 1
        before = _content(self.root)
        memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        code, stdout, stderr = self._call(arguments)
        seconds = time.monotonic() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024
        shutil.rmtree(self.root / "out", ignore_errors=True)
        told = f"{family}: {list(arguments)!r:.500} -> {code}, {stderr[-1500:]!r}"
        if canary is not None and canary.exists():
            raise Broken(f"it was executed: {told}")
        if grown > _MOST_BYTES:
            raise Broken(f"took {grown / 2**30:.1f} GiB: {told}")
        if seconds > _MOST_SECONDS:
            raise Broken(f"took {seconds:.0f} s: {told}")
        if _content(self.root) != before:
            raise Broken(f"changed files: {told}")
        if code == 0:
            self.tally.accepted[family] += 1
            return False
        lines = stderr.splitlines()
        if code != 2 or stdout or len(lines) != 1 or not lines[0].startswith("lockstep: "):
            raise Broken(f"not refused in one line: {told}; {stdout[-300:]!r}")
        if len(lines[0]) > 2100 or not lines[0].isprintable():
            raise Broken(f"no line for a terminal: {told}")
        return True

    def _call(self, arguments: tuple[str, ...]) -> tuple[Any, str, str]:
        """What is usable stops where the ranks would start: their work is the subject of other tests."""
        stdout, stderr = io.StringIO(), io.StringIO()
        started = mock.patch.object(train_command, "_run_to_the_end", return_value=0)
        argv = mock.patch.object(sys, "argv", ["lockstep", *arguments])
        with started, argv, _in(self.root), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                cli.main()
                code: Any = 0
            except SystemExit as exit_:
                code = exit_.code
            except BaseException as error:
                raise Broken(f"{list(arguments)!r:.500} -> {type(error).__name__}: {error!s:.500}") from error
        return code, stdout.getvalue(), stderr.getvalue()

    @contextlib.contextmanager
    def input(self, name: str, content: bytes | str) -> Iterator[Path]:
        """A file with this content, for as long as the case lasts."""
        path = self.root / "input" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        try:
            yield path
        finally:
            shutil.rmtree(self.root / "input")


@contextlib.contextmanager
def victim() -> Iterator[Victim]:
    """A victim in a temporary place, offline, with a cache of its own."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        root = Path(name)
        variables = {
            "LOCKSTEP_CACHE": str(root / "cache"),
            "HF_HOME": str(root / "cache" / "hub"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        place = root / "place"
        place.mkdir()
        with mock.patch.dict(os.environ, variables):
            yield Victim(place)


@contextlib.contextmanager
def _in(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def _content(root: Path) -> dict[str, tuple[int, int]]:
    """Every file but those of the case itself, by size and time of change."""
    found = {}
    for path in root.rglob("*"):
        facts = path.lstat()
        if path.is_relative_to(root / "out") or path.is_dir():
            continue
        found[str(path)] = (facts.st_size, facts.st_mtime_ns)
    return found


def _save_small_model(directory: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    from tasks.text.tokenizers import train_wordpiece

    tokenizer = train_wordpiece(["good film", "bad film"], vocab_size=60, max_length=64)
    config = BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    BertForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
