"""The families of hostile input; in each, hypothesis thinks of as many as it is asked for."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from records.checkpoint import digest_of, read_checkpoint
from records.config import RunOptions
from tasks.text.settings import TextClassificationSettings
from tests.hostile.victim import Victim

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def _many(number: int, strategy: st.SearchStrategy[Any], attack: Callable[[Any], Any]) -> None:
    """Has hypothesis think of `number` examples, other ones each time."""

    @settings(
        max_examples=number, deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def try_one(example: Any) -> None:
        attack(example)

    try_one()


def options(victim: Victim, number: int) -> None:
    """An option with a value that is none of its kind."""
    fields = {**RunOptions.model_fields, **TextClassificationSettings.model_fields}
    of_kind: dict[str, list[str]] = {"int": [], "float": [], "choice": []}
    for name, one in fields.items():
        annotations = (one.annotation, *get_args(one.annotation))
        if name in ("save_every", "resume"):
            continue
        if int in annotations:
            of_kind["int"].append(name)
        elif float in annotations:
            of_kind["float"].append(name)
        elif any(str(get_origin(a)).endswith("Literal") for a in annotations):
            of_kind["choice"].append(name)
    not_numbers = _TEXT.filter(lambda text: not _is_number(text)) | st.sampled_from(
        [
            "nan",
            "inf",
            "-inf",
            "1e999",
            "0x10",
            "1_0",
            "\uff11\uff12",
            "--",
            "",
            "NaN",
            "\u0663",
            "1,5",
            "1e",
            "\x00",
            "[1]",
            "{}",
        ]
    )
    huge = st.integers(min_value=10**12).map(str) | st.integers(max_value=-1000).map(str)
    case = st.one_of(
        st.tuples(st.sampled_from(of_kind["int"]), not_numbers.filter(lambda t: t != "1_0") | huge),
        st.tuples(st.sampled_from(of_kind["float"]), not_numbers.filter(lambda t: t != "1_0")),
        st.tuples(st.sampled_from(of_kind["choice"]), _TEXT.filter(lambda text: text not in _words(fields))),
        st.tuples(_TEXT.filter(lambda text: text not in fields), _TEXT),
        st.tuples(st.just("save_every"), _TEXT.filter(lambda t: not t.isdigit() and t != "never" and "min" not in t)),
        st.tuples(st.just("resume"), _TEXT.filter(lambda text: text.strip() != "")),
    )

    def attack(example: tuple[str, str]) -> None:
        name, value = example
        arguments = ["single", "--task", "token-tagging", f"--{name.replace('_', '-')}={value}", "--output-dir", "out"]
        victim.attack("options", *(argument.replace("\x00", "") for argument in arguments))

    _many(number, case, attack)


def option_files(victim: Victim, number: int) -> None:
    """A configuration file of bytes, of text, of JSON, or of an ordinary mapping gone wrong."""
    names = st.sampled_from([*RunOptions.model_fields, "model", "train_file", "no_such_option"])
    mappings = st.dictionaries(names, _JSON, min_size=1, max_size=4).map(json.dumps)
    bombs = st.integers(3, 12).map(_aliases)
    content = st.binary(max_size=200) | _TEXT | _JSON.map(json.dumps) | mappings | mappings | bombs

    def attack(example: bytes | str) -> None:
        with victim.input("options.yaml", example) as path:
            arguments = ("--task", "token-tagging", "--config", str(path), "--output-dir", "out")
            victim.attack("option files", "single", *arguments)

    _many(number, content, attack)


def data_files(victim: Victim, number: int) -> None:
    """A file of rows, damaged or made up, under each of the endings."""
    valid = (victim.root / "rows.csv").read_bytes()
    jsonl = b"".join(
        json.dumps({"text": row.split(",")[0], "label": row.split(",")[1]}).encode() + b"\n"
        for row in valid.decode().splitlines()[1:]
    )
    fields = st.text(st.characters(codec="utf-8"), max_size=12)
    rows = st.lists(st.tuples(fields, fields), max_size=6).map(
        lambda rows: "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows)
    )
    objects = st.lists(_JSON, max_size=5).map(lambda rows: "\n".join(json.dumps(row) for row in rows))
    case = st.one_of(
        st.tuples(st.just("csv"), _damaged(valid)),
        st.tuples(st.just("tsv"), _damaged(valid.replace(b",", b"\t"))),
        st.tuples(st.just("jsonl"), _damaged(jsonl)),
        st.tuples(st.just("parquet"), _damaged(_parquet(valid))),
        st.tuples(st.sampled_from(["csv", "tsv", "jsonl", "parquet"]), st.binary(max_size=300)),
        st.tuples(st.just("csv"), rows),
        st.tuples(st.just("jsonl"), objects),
    )

    def attack(example: tuple[str, bytes | str]) -> None:
        ending, content = example
        with victim.input(f"train.{ending}", content) as path:
            files = ("--train-file", str(path), "--validation-file", "rows.csv")
            victim.attack("data files", "single", *files, "--max-seq-length", "16", "--output-dir", "out")

    _many(number, case, attack)


def model_directories(victim: Victim, number: int) -> None:
    """A model directory one of whose files is damaged, made up, or absurd."""
    files = {path.name: path.read_bytes() for path in victim.model.iterdir()}
    config = json.loads(files["config.json"])
    absurd = st.tuples(st.sampled_from(sorted(config)), _JSON | st.just(10**15)).map(
        lambda change: json.dumps(config | {change[0]: change[1]}).encode()
    )
    case = st.one_of(
        st.sampled_from(sorted(files)).flatmap(lambda name: st.tuples(st.just(name), _damaged(files[name]))),
        st.tuples(st.sampled_from(sorted(files)), st.binary(max_size=200)),
        st.tuples(st.sampled_from(sorted(files)), _JSON.map(lambda value: json.dumps(value).encode())),
        st.tuples(st.just("config.json"), absurd),
    )

    def attack(example: tuple[str, bytes]) -> None:
        name, content = example
        with victim.input("model/placeholder", b"") as placeholder:
            placeholder.unlink()
            for other, whole in files.items():
                (placeholder.parent / other).write_bytes(content if other == name else whole)
            where = ("--model", str(placeholder.parent), "--train-file", "rows.csv", "--validation-file", "rows.csv")
            victim.attack("model directories", "single", *where, "--max-seq-length", "8", "--output-dir", "out")

    _many(number, case, attack)


def checkpoints(victim: Victim, number: int) -> None:
    """A checkpoint damaged, torn, made of something else, or whole by its hash and absurd in what it says."""
    whole = victim.checkpoint.read_bytes()
    state = read_checkpoint(victim.checkpoint).state.model_dump(mode="json")
    canary = victim.root / "executed"
    archive = io.BytesIO()
    torch.save({"model": _Payload(canary)}, archive)
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("bomb", bytes(50_000_000))
    paths = st.sampled_from([*((key,) for key in state), *(("config", key) for key in state["config"])])
    lies = st.tuples(paths, _JSON | st.sampled_from([10**18, -1, "os:system", "x:y", "../../../etc/passwd", "$(id)"]))
    case = st.one_of(
        _damaged(whole),
        st.binary(max_size=300),
        st.sampled_from([pickle.dumps(_Payload(canary)), archive.getvalue(), zipped.getvalue()]),
        st.integers(0, 2**64 - 1).map(lambda length: length.to_bytes(8, "little") + whole[8:]),
        lies.map(lambda lie: _forged(state, *lie)),
    )

    def attack(example: bytes) -> None:
        with victim.input("step-00000004.safetensors", example) as path:
            victim.attack("checkpoints", "single", "--resume", str(path), "--output-dir", "out", canary=canary)

    _many(number, case, attack)


def records(victim: Victim, number: int) -> None:
    """A record damaged, or changed in one place, for a report."""
    record = json.loads((victim.run / "record.json").read_text())
    whole = json.dumps(record).encode()
    places = list(_places(record))
    changed = st.tuples(st.sampled_from(places), _JSON | st.sampled_from([10**400, "<script>", "\x1b[31m"])).map(
        lambda change: json.dumps(_with(record, *change)).encode()
    )
    case = st.one_of(
        _damaged(whole), st.binary(max_size=200), _JSON.map(lambda value: json.dumps(value).encode()), changed, changed
    )

    def attack(example: bytes) -> None:
        with victim.input("record.json", example) as path:
            victim.attack("records", "report", str(path), "--output-dir", "out")

    _many(number, case, attack)


FAMILIES: dict[str, Callable[[Victim, int], None]] = {
    "options": options,
    "option files": option_files,
    "data files": data_files,
    "model directories": model_directories,
    "checkpoints": checkpoints,
    "records": records,
}


class _Payload:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.proof}",)


def _damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """The content cut, or with some bytes changed, put in, taken out or repeated."""

    def damage(seed: int) -> bytes:
        draw = random.Random(seed)
        content = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(content) + 1)
            kind = draw.choice(["cut", "change", "insert", "remove", "repeat"])
            if kind == "cut":
                del content[place:]
            elif kind == "change" and place < len(content):
                content[place] = draw.randrange(256)
            elif kind == "insert":
                content[place:place] = draw.choice(
                    [b"\x00", b'"', b"\n", b"\xff\xfe", b",", b"\t", b"{", b"\r", b"\x1a"]
                )
            elif kind == "remove":
                del content[place : place + draw.randint(1, 20)]
            else:
                content[place:place] = content[place : place + 50] * draw.randint(1, 5)
        return bytes(content)

    return st.integers(0, 2**32).map(damage)


def _parquet(csv: bytes) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [line.split(",") for line in csv.decode().splitlines()[1:]]
    table = pa.table({"text": [row[0] for row in rows], "label": [row[1] for row in rows]})
    file = io.BytesIO()
    parquet.write_table(table, file)
    return file.getvalue()


def _forged(state: dict[str, Any], path: tuple[str, ...], value: Any) -> bytes:
    """A checkpoint whose hash is right and whose content is not."""
    text = json.dumps(_with(state, path, value))
    tensors = {"model.output.bias": torch.zeros(7)}
    return save(tensors, {"lockstep": text, "sha256": digest_of(text, tensors)})


def _places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return copy


def _aliases(depth: int) -> str:
    """A few lines of YAML that stand for ten to the power of `depth` elements."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, depth):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    return "\n".join([*lines, f"seed: *a{depth - 1}"])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _words(fields: dict[str, Any]) -> set[str]:
    return {
        str(word)
        for one in fields.values()
        for a in (one.annotation, *get_args(one.annotation))
        for word in get_args(a)
    }
