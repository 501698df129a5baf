"""Hostile inputs that chance would not find: what is endless, what swells when it is read, what is no file."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save

from records.checkpoint import read_checkpoint
from tests.hostile.victim import Victim

_GIB = 2**30


def gigabyte_lines(victim: Victim) -> None:
    """A line of a gigabyte, in each format; in the header and after it."""
    for ending, begin in (("csv", b""), ("csv", b"text,label\n"), ("tsv", b"text\tlabel\n"), ("jsonl", b'{"text": "')):
        with victim.input(f"train.{ending}", begin) as path:
            with path.open("ab") as file:
                for _ in range(64):
                    file.write(b"a" * (_GIB // 64))
            _train_on(victim, path)


def swelling_parquet(victim: Victim) -> None:
    """A few kilobytes that stand for terabytes: one long text, a hundred million times."""
    import pyarrow as pa
    from pyarrow import parquet

    with victim.input("train.parquet", b"") as path:
        index = pa.array([0] * 1_000_000, pa.int32())
        text = pa.DictionaryArray.from_arrays(index, pa.array(["x" * 100_000]))
        label = pa.DictionaryArray.from_arrays(index, pa.array(["1"]))
        table = pa.table({"text": text, "label": label})
        with parquet.ParquetWriter(path, table.schema, compression="zstd") as writer:
            for _ in range(20):
                writer.write_table(table)
        assert path.stat().st_size < 10_000_000
        _train_on(victim, path)
        victim.attack("special", "single", "--dataset", str(path.parent), "--output-dir", "out")


def archives(victim: Victim) -> None:
    """Data sets in archives, one of them a bomb."""
    for name, content in (("train.csv.gz", _gzipped()), ("data.zip", _zipped()), ("data.tar", _tarred(victim))):
        with victim.input(f"set/{name}", content) as path:
            victim.attack("special", "single", "--dataset", str(path.parent), "--output-dir", "out")


def not_files(victim: Victim) -> None:
    """Pipes nobody writes to, devices without end, directories, links in a circle, in place of every kind of file."""
    with victim.input("placeholder", b"") as placeholder:
        place = placeholder.parent
        os.mkfifo(place / "pipe.csv")
        (place / "circle.csv").symlink_to(place / "circle.csv")
        (place / "zero.csv").symlink_to("/dev/zero")
        (place / "nothing.csv").symlink_to("/dev/null")
        (place / "directory.csv").mkdir()
        for name in ("pipe.csv", "circle.csv", "zero.csv", "nothing.csv", "directory.csv"):
            path = place / name
            _train_on(victim, path)
            victim.attack("special", "single", "--config", str(path), "--output-dir", "out")
            victim.attack("special", "single", "--resume", str(path), "--output-dir", "out")
            victim.attack("special", "single", "--model", str(path), "--output-dir", "out")
            victim.attack("special", "report", str(path), "--output-dir", "out")


def swelling_options(victim: Victim) -> None:
    """Nesting without end, and numbers of a million digits."""
    for content in ("[" * 100_000, "{a: " * 50_000, "seed: " + "9" * 1_000_000, "- " * 100_000, "a" * 2_000_000):
        with victim.input("options.yaml", content) as path:
            victim.attack("special", "single", "--config", str(path), "--output-dir", "out")


def names_for_a_shell(victim: Victim) -> None:
    """Paths and labels that a shell would obey, and a terminal."""
    canary = victim.root / "executed"
    for name in (
        f"$(touch {canary.name}).csv",
        f"`touch {canary.name}`.csv",
        f"x;touch {canary.name}.csv",
        "\x1b[2J.csv",
    ):
        victim.attack("special", "single", "--train-file", name, "--validation-file", "rows.csv", canary=canary)
        victim.attack("special", "single", "--task", name, "--output-dir", "out", canary=canary)
        victim.attack("special", "single", "--resume", name, "--output-dir", "out", canary=canary)
    evil = "text,label\na,\x1b]0;evil\x07\nb,$(touch executed)\n"
    with victim.input("train.csv", evil) as path:
        _train_on(victim, path)


def checkpoints_that_choose(victim: Victim) -> None:
    """Whole checkpoints that would have code imported, something fetched, or a thousand ranks started."""
    from records.checkpoint import digest_of

    whole = read_checkpoint(victim.checkpoint)
    state = whole.state.model_dump(mode="json")
    text = {"max_seq_length": 16, "model": "bert-tiny"}
    for changes in (
        {"task": "antigravity:Task"},
        {"task": "tests.hostile.families:FAMILIES"},
        {"task": "text-classification", "task_settings": {**text, "dataset": "someone/something"}},
        {"task": "text-classification", "task_settings": {**text, "model": "someone/something"}},
        {"task": "text-classification", "task_settings": {**text, "train_file": "/dev/zero"}},
        {"num_processes": 1000},
        {"num_processes": "1; rm -rf /"},
        {"task_settings": {"num_train_samples": 10**30}},
        {"task_settings": []},
        {"backend_settings": {"x": 1}, "seed": None, "learning_rate": "fast"},
    ):
        forged = json.dumps({**state, "config": {**state["config"], **changes}})
        content = save(whole.tensors, {"lockstep": forged, "sha256": digest_of(forged, whole.tensors)})
        with victim.input("step-00000004.safetensors", content) as path:
            victim.attack("special", "single", "--resume", str(path), "--output-dir", "out")


def records_that_swell(victim: Victim) -> None:
    """Nesting without end, and a file larger than any record."""
    for content in ("[" * 200_000, '{"schema_version": 3, "x": ' * 20_000, json.dumps({"schema_version": "9" * 10**6})):
        with victim.input("record.json", content) as path:
            victim.attack("special", "report", str(path), "--output-dir", "out")
    with victim.input("record.json", b"{") as path:
        os.truncate(path, 40 * _GIB)  # sparse: nothing of it is on the disk
        victim.attack("special", "report", str(path), "--output-dir", "out")
    with victim.input("step-00000004.safetensors", b"x") as path:
        os.truncate(path, 400 * _GIB)
        victim.attack("special", "single", "--resume", str(path), "--output-dir", "out")
    with victim.input("train.csv", b"text,label\n") as path:
        os.truncate(path, 400 * _GIB)
        _train_on(victim, path)


SPECIAL: tuple[Callable[[Victim], None], ...] = (
    gigabyte_lines,
    swelling_parquet,
    archives,
    not_files,
    swelling_options,
    names_for_a_shell,
    checkpoints_that_choose,
    records_that_swell,
)


def _train_on(victim: Victim, path: Path) -> None:
    files = ("--train-file", str(path), "--validation-file", "rows.csv")
    victim.attack("special", "single", *files, "--max-seq-length", "16", "--output-dir", "out")


def _gzipped() -> bytes:
    return gzip.compress(b"text,label\n" + b"a,1\n" * 20_000_000)


def _zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("train.csv", b"text,label\n" + b"a,1\n" * 20_000_000)
    return file.getvalue()


def _tarred(victim: Victim) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(victim.root / "rows.csv", arcname="../../escaped.csv")
    return file.getvalue()
