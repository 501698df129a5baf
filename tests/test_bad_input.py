"""Bad input ends with one clear line and exit code 2; nothing has been created or changed.

Every case names the command and what its message must contain: the value that is wrong and,
where there is one, the way out.
"""

from __future__ import annotations

import gzip
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from safetensors.numpy import save_file

from backends.registry import BACKENDS
from launch.cli import main
from tests.forked.client import ForkedJob
from tests.launching import run_config

LOCKSTEP = Path(sys.executable).with_name("lockstep")
RUN_SH = Path(__file__).parent.parent / "launch" / "run.sh"

ROWS = "text,label\ngood,1\nbad,0\nfine,1\npoor,0\n"
MODEL_CONFIG = json.dumps({"model_type": "bert", "max_position_embeddings": 64})

TEXT_FILES: dict[str, str | bytes] = {
    "rows.csv": ROWS,
    "empty.csv": "",
    "blank-line.csv": "\n",
    "header.csv": "text,label\n",
    "header.tsv": "text\tlabel\n",
    "review-column.csv": "review,label\na,1\nb,0\n",
    "stars-column.csv": "text,stars\na,1\nb,0\n",
    "two-text-columns.csv": "text,label,text\na,1,b\nb,0,c\n",
    "no-text.csv": "text,label\na,1\n,0\n",
    "no-text.jsonl": '{"text": "a", "label": 1}\n{"text": null, "label": 0}\n',
    "text-key-absent.jsonl": '{"text": "a", "label": 1}\n{"label": 0}\n',
    "only-nulls.jsonl": '{"text": null, "label": 1}\n{"text": null, "label": 0}\n',
    "white-space.csv": 'text,label\na,1\n"  \t ",0\n',
    "no-label.csv": "text,label\na,1\nb,\n",
    "no-label.jsonl": '{"text": "a", "label": 1}\n{"text": "b", "label": null}\n',
    "one-label.csv": "text,label\na,1\nb,1\n",
    "unseen-label.csv": "text,label\na,1\nb,7\n",
    "dashed-labels.csv": "text,label\na,--5\nb,5\n",
    "latin1.csv": "text,label\ncafé,1\nb,0\n".encode("latin-1"),
    "latin1.tsv": "text\tlabel\ncafé\t1\nb\t0\n".encode("latin-1"),
    "latin1.jsonl": '{"text": "café", "label": 1}\n{"text": "b", "label": 0}\n'.encode("latin-1"),
    "latin1-header.csv": "text,label,résumé\na,1,x\nb,0,y\n".encode("latin-1"),
    "utf16.csv": ROWS.encode("utf-16"),
    "utf16.jsonl": '{"text": "a", "label": 1}\n'.encode("utf-16"),
    "too-many-fields.csv": "text,label\na,1\nb,0,more\n",
    "too-few-fields.tsv": "text\tlabel\na\t1\nb\n",
    "open-quote.csv": 'text,label\na,1\n"b,0\nc,1\n',
    "cut-off.jsonl": '{"text": "a", "label": 1}\n{"text": "b", "label":\n',
    "array.jsonl": '[{"text": "a", "label": 1},\n{"text": "b", "label": 0}]\n',
    "mixed-labels.jsonl": '{"text": "a", "label": 1}\n{"text": "b", "label": "x"}\n',
    "fake.parquet": ROWS,
    "numbers.jsonl": '{"text": 1, "label": 1}\n{"text": 2, "label": 0}\n',
    "list-labels.jsonl": '{"text": "a", "label": [1]}\n{"text": "b", "label": [0]}\n',
    "object-labels.jsonl": '{"text": "a", "label": {"x": 1}}\n{"text": "b", "label": {"x": 2}}\n',
    "look-alikes.csv": "text,label\na,pos\nb, pos\nc,POS\nd,neg\n",
    "number-spellings.csv": "text,label\na,1\nb,1.0\nc,0\n",
    "normal-forms.csv": "text,label\na,caf\u00e9\nb,cafe\u0301\nc,tea\n",
    "missing-labels.csv": "text,label\na,1\nb,NaN\nc,0\n",
    "number-each.csv": "text,label\n" + "".join(f"text {n},{n * 0.37:.2f}\n" for n in range(300)),
    "label-each.csv": "text,label\n" + "".join(f"{n % 2},text {n}\n" for n in range(300)),
    "swallowing-quote.csv": "text,label\n" + 300_000 * "a,1\n" + '"b,0\n' + 300_000 * "c,0\n",
    "semicolons.csv": "text;label\ngood;1\nbad;0\n",
    "tabs.csv": "text\tlabel\ngood\t1\nbad\t0\n",
    "same-name.csv": "text , label,label \ngood,1,1\nbad,0,0\n",
    "packed.csv": gzip.compress(ROWS.encode()),
    "nul.csv": "text,label\ngo\0od,1\nbad,0\n",
    "nul-header.csv": ROWS.encode("utf-16-le"),
    "key-twice.jsonl": '{"text": "a", "text": "b", "label": 1}\n{"text": "b", "label": 0}\n',
    "three-labels.csv": "text,label\na,x\nb,y\nc,z\n",
    "rows.txt": ROWS,
    "rows.CSV": ROWS,
    "directory.csv/rows.csv": ROWS,
    "only-train/train.csv": ROWS,
    "other-columns/train.csv": "text,stars\na,1\nb,0\n",
    "other-columns/test.csv": "text,stars\na,1\nb,0\n",
    "damaged/train.jsonl": '{"text": "a", "label":\n',
    "damaged/test.jsonl": '{"text": "a", "label": 1}\n',
    "no-data/README": "nothing here",
    "complete/train.csv": ROWS,
    "complete/test.csv": ROWS,
    "mixed/config.json": "{}",
    "mixed/run.json": run_config("single", 1, Path("mixed"), micro_batch_size=32).model_dump_json(),
    "run/run.json": run_config("single", 1, Path("run"), micro_batch_size=32).model_dump_json(),
    "run/record.json": "{}",
    "not-ours/run.json": "{}",
    "not-ours/record.json": "{}",
    "run/rows.csv": ROWS,
    "run/model/notes.txt": "weights of the last run",
    "foreign/notes.txt": "mine",
    "config/broken.yaml": "num_processes: [1\nseed: }",
    "config/list.yaml": "- num_processes\n- 2\n",
    "config/empty.yaml": "",
    "config/number-as-name.yaml": "1: 2\n",
    "config/misspelt.yaml": "num_proceses: 2\n",
    "config/itself.yaml": "config: other.yaml\n",
    "config/word-for-number.yaml": "num_processes: many\n",
    "config/list-for-number.yaml": "num_processes: [1, 2]\n",
    "config/yes-for-number.yaml": "num_processes: yes\n",
    "config/null.yaml": "seed: 3\ntrain_file:\n",
    "config/number-for-name.yaml": "text_column: 5\n",
    "config/choice.json": '{"precision": "int4"}',
    "config/word-for-flag.yaml": "overwrite: perhaps\n",
    "config/task.yaml": "task: summarise\n",
    "config/impossible-date.yaml": "output_dir: 2026-02-30\n",
    "config/two-lines.yaml": "model: |\n  first\n  second\n",
    "config/latin1.yaml": "model: é\n".encode("latin-1"),
    "config/python.yaml": "seed: !!python/object/apply:os.getpid []\n",
    "config/deep.yaml": "[" * 500,
    "config/twice.yaml": "seed: 1\nnum_processes: 2\nseed: 1\n",
    "config/twice.json": '{"seed": 1,\n "num_processes": 2,\n "seed": 1}',
    "config/dash-and-underscore.yaml": "num-processes: 2\nnum_processes: 2\n",
    "config/twice-deeper.yaml": "model: {a: 1,\n a: 2}\n",
    "config/octal.yaml": "num_train_epochs: 010\nnum_processes: 3\n",
    "config/sexagesimal.yaml": "num_train_epochs: 1:30\n",
    "config/hexadecimal.yaml": "num_train_epochs: 0x10\n",
    "config/underscore.yaml": "num_train_epochs: 1_\n",
    "config/two-documents.yaml": "seed: 1\n---\nseed: 2\n",
    "config/tab.yaml": "seed:\n\t1\n",
    "config/comments.json": '// a comment\n{"seed": 1}',
    "config/utf16.yaml": "seed: 1\n".encode("utf-16"),
    "config/nested.yaml": "run:\n  seed: 1\n",
    "config/empty-path.yaml": 'output_dir: ""\n',
    "config/home.yaml": "train_file: ~/nowhere.csv\nvalidation_file: ~/nowhere.csv\n",
    "config/home-model.yaml": "model: ~/nowhere\n",
    "config/home-resume.yaml": "resume: ~/nowhere\n",
    "config/home-output.yaml": "output_dir: ~/foreign\n",
    "config/first.yaml": "seed: 1\n",
    "config/marked.yaml": b"\xef\xbb\xbfnum_processes: 3\r\n",
}

# What to put into a model's directory, or to leave out (None), other than in a complete one.
MODELS: dict[str, dict[str, str | None]] = {
    "model": {},
    "model-without-config": {"config.json": None},
    "model-without-weights": {"model.safetensors": None},
    "model-with-pickle": {"model.safetensors": None, "pytorch_model.bin": "a pickle"},
    "model-with-pointer": {"model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"},
    "model-without-tokenizer": {"tokenizer.json": None, "tokenizer_config.json": None},
    "model-without-vocabulary": {"tokenizer.json": None},
    "model-with-broken-config": {"config.json": "{broken"},
    "model-with-list-as-config": {"config.json": "[]"},
    "model-with-broken-tokenizer": {"tokenizer.json": "{broken"},
}

# Directories to put on PYTHONPATH: packages that pose as another, and one that hides another.
HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name == "{name}" else find(name, *rest))
"""
PACKAGES = {
    "no-horovod/sitecustomize.py": HIDE.format(name="horovod"),
    "no-accelerate/sitecustomize.py": HIDE.format(name="accelerate"),
    "no-apex/sitecustomize.py": HIDE.format(name="apex"),
    "bare-horovod/horovod/__init__.py": "",
    "horovod/horovod/torch/mpi_lib_v2.so": "",
    "accelerate/accelerate/__init__.py": "",
    "pyramid-apex/apex/__init__.py": "",
    "new-apex/apex/__init__.py": "",
    "new-apex/apex/multi_tensor_apply/__init__.py": "",
    "apex/apex/__init__.py": "",
    "apex/apex/multi_tensor_apply/__init__.py": "",
    "apex/apex/amp/__init__.py": "",
    "apex/apex/parallel/__init__.py": "",
    "own/broken_syntax.py": "def\n",
    "own/raising.py": "raise RuntimeError('no licence\\nfound')\n",
    "own/own_backend.py": "from backends.interface import Backend\nclass Undeclared(Backend): pass\n",
}


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
        before = _content(self.work), _content(self.cache)
        yield
        assert (_content(self.work), _content(self.cache)) == before


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


def _content(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if path.suffix != ".lock"
    }


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _write_models(directory: Path) -> None:
    complete = {"config.json": MODEL_CONFIG, "tokenizer.json": "{}", "tokenizer_config.json": "{}"}
    for name, changes in MODELS.items():
        for file, content in {**complete, **changes}.items():
            if content is not None:
                _write(directory / name / file, content)
        if "model.safetensors" not in changes:
            save_file({"weight": np.zeros(2, np.float32)}, directory / name / "model.safetensors")


def _write_parquet(directory: Path) -> None:
    tables = {
        "numbers": {"text": [1, 2], "label": [1, 0]},
        "list-labels": {"text": ["a", "b"], "label": [[1], [0]]},
        "not-a-number": {"text": ["a", "b", "c"], "label": [1.0, 0.0, float("nan")]},
        "no-rows": {"text": pa.array([], pa.string()), "label": pa.array([], pa.string())},
    }
    for name, columns in tables.items():
        parquet.write_table(pa.table(columns), directory / f"{name}.parquet")
    # As the hub has it: the features, with the names of the labels, in the metadata.
    features = {"text": {"dtype": "string", "_type": "Value"}, "label": {"names": ["n", "p"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    withheld = directory / "withheld"
    withheld.mkdir()
    for split, labels in (("train", [0, 1]), ("test", [-1, -1])):
        table = pa.table({"text": ["a", "b"], "label": labels}).replace_schema_metadata(metadata)
        parquet.write_table(table, withheld / f"{split}.parquet")


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("bad-input")
    work, cache, packages = root / "work", root / "cache", root / "packages"
    for name, content in TEXT_FILES.items():
        _write(work / name, content)
    for name, content in PACKAGES.items():
        _write(packages / name, content)
    _write_models(work)
    _write_parquet(work)
    for name, target in {"dangling": "nowhere-at-all", "circle": "circle"}.items():
        (work / name).symlink_to(target)
    (cache / "text").mkdir(parents=True)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LOCKSTEP_", "HF_")) and name not in ("PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
    }
    own = {
        "LOCKSTEP_CACHE": str(cache),
        "HOME": str(work),
        "HF_HOME": str(root / "hub"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return Place(work, cache, packages, inherited | own)


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


@pytest.fixture
def lockstep(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Calls the command's entry point in this process: hundreds of new ones would take minutes."""
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(place.work)

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return Outcome(exit_.value.code, *capfd.readouterr())

    return call


def _train_on(file: str) -> str:
    return f"single --train-file {file} --validation-file rows.csv"


def _validate_on(file: str) -> str:
    return f"single --train-file rows.csv --validation-file {file}"


def _fine_tune(model: str) -> str:
    return f"{_train_on('rows.csv')} --max-seq-length 32 --model {model}"


LONG_NAME = 300 * "x"

# id -> (arguments of lockstep, what the message must contain...): bad options.
OPTION_CASES: dict[str, tuple[str, ...]] = {
    "momentum-without-sgd": ("ddp --momentum 0.9", "--momentum 0.9", "--optimizer sgd"),
    "backend-unknown": ("dpd", "'dpd'", "choose single, ddp, apex, horovod, accelerate"),
    "backend-empty": ("''", "there is no backend ''", "choose single"),
    "backend-forgotten": ("--num-processes 2", "'--num-processes'", "choose single"),
    "backend-module-missing": ("nowhere:Adapter", "'nowhere:Adapter'", "No module named 'nowhere'", "PYTHONPATH"),
    "backend-class-missing": ("pathlib:Adapter", "'pathlib:Adapter'", "has no attribute 'Adapter'"),
    "backend-class-unnamed": ("pathlib:", "'pathlib:'", "cannot be imported"),
    "backend-module-unnamed": (":Adapter", "':Adapter'", "cannot be imported"),
    "backend-module-relative": ("..up:Adapter", "'..up:Adapter'", "cannot be imported"),
    "backend-no-subclass": ("pathlib:Path", "'pathlib:Path'", "not a subclass of backends.interface.Backend"),
    "backend-no-class": ("os:getcwd", "'os:getcwd'", "not a subclass of backends.interface.Backend"),
    "doctor-with-option": ("doctor --device cpu", "unrecognized arguments: --device cpu", "doctor --help"),
    "option-unknown": ("ddp --quux 1", "unknown option --quux", "launch/run.sh ddp --help"),
    "option-misspelt": ("ddp --num-proceses 2", "--num-proceses", "did you mean --num-processes?"),
    "option-misspelt-with-value": ("ddp --presicion=fp16", "--presicion;", "did you mean --precision?"),
    "option-misspelt-config": ("ddp --confg x.yaml", "--confg", "did you mean --config?"),
    "option-of-the-task-misspelt": ("ddp --model-name x", "--model-name", "did you mean --model?"),
    "option-of-another-task": ("ddp --num-train-samples 5", "unknown option --num-train-samples", "did you mean"),
    "option-abbreviated": ("ddp --output x", "unknown option --output", "--output-dir"),
    "option-without-value": ("ddp --num-processes", "--num-processes", "expected one argument", "--help"),
    "option-without-value-before-another": ("ddp --seed --overwrite", "--seed", "expected one argument"),
    "config-without-value": ("ddp --config", "--config", "expected one argument"),
    "flag-with-value": ("ddp --overwrite=yes", "--overwrite", "'yes'"),
    "argument-stray": ("ddp 4", "unknown option 4", "--help"),
    "value-with-line-break": ("ddp --num-processes '1\n2'", "--num-processes 1 2", "valid integer"),
    "device-choice": ("ddp --device tpu", "--device tpu", "'auto', 'cpu' or 'cuda'"),
    "device-empty": ("ddp --device ''", "--device ", "'auto', 'cpu' or 'cuda'"),
    "precision-choice": ("ddp --precision fp8", "--precision fp8", "'fp32', 'bf16' or 'fp16'"),
    "optimizer-choice": ("ddp --optimizer lamb", "--optimizer lamb", "'adamw' or 'sgd'"),
    "lr-scheduler-choice": ("ddp --lr-scheduler step", "--lr-scheduler step", "'linear', 'cosine' or 'constant'"),
    "start-method-of-another": ("ddp --start-method horovodrun", "--start-method horovodrun", "torchrun or spawn"),
    "start-method-empty": ("ddp --start-method ''", "--start-method ", "torchrun or spawn"),
    "start-method-single": ("single --start-method spawn", "--start-method spawn", "started by python"),
    "task-unknown": ("ddp --task summarise", "'summarise'", "choose text-classification, token-tagging"),
    "task-empty": ("ddp --task ''", "there is no task ''", "choose text-classification"),
    "task-module-missing": ("ddp --task nowhere:Task", "'nowhere:Task'", "PYTHONPATH"),
    "task-module-unnamed": ("ddp --task :Task", "':Task'", "cannot be imported"),
    "task-no-subclass": ("ddp --task pathlib:Path", "'pathlib:Path'", "not a subclass of tasks.interface.Task"),
    "single-with-two-ranks": ("single --num-processes 2", "--num-processes 2", "at most 1", "choose another backend"),
    "global-batch-and-ranks": (
        "ddp --num-processes 3",
        "--global-batch-size 32",
        "3 ranks",
        "choose a multiple of 3 or other --num-processes",
    ),
    "global-batch-and-micro-batch": (
        "ddp --num-processes 2 --micro-batch-size 3",
        "--global-batch-size 32",
        "--micro-batch-size 3 x 2 ranks = 6",
        "change one of the three",
    ),
    "output-holds-run": ("ddp --output-dir run", "--output-dir run", "holds a run already", "--overwrite"),
    "output-holds-files-named-alike": ("ddp --output-dir not-ours --overwrite", "not-ours", "is no run"),
    "output-holds-other-files": ("ddp --output-dir foreign", "--output-dir foreign", "no run; choose another"),
    "output-holds-other-files-overwrite": ("ddp --output-dir foreign --overwrite", "foreign", "choose another"),
    "output-is-working-directory": ("ddp --output-dir . --overwrite", "--output-dir .", "choose another directory"),
    "output-is-file": ("ddp --output-dir rows.csv --overwrite", "--output-dir rows.csv", "name a directory"),
    "output-below-file": ("ddp --output-dir rows.csv/a/b", "rows.csv is a file", "choose another directory"),
    "output-name-too-long": (f"ddp --output-dir {LONG_NAME}", LONG_NAME, "name too long"),
    "overwrite-but-option-is-bad": ("ddp --output-dir run --overwrite --seed x", "--seed x", "valid integer"),
    "overwrite-but-data-are-bad": (f"{_train_on('no-text.csv')} --output-dir run --overwrite", "has no text"),
    "overwrite-would-remove-model": (
        "ddp --output-dir run --overwrite --model run",
        "--overwrite would remove --model",
        "choose another --output-dir",
    ),
    "overwrite-would-remove-data": (
        f"{_validate_on('run/run.json')} --output-dir run --overwrite",
        "--overwrite would remove --validation-file",
        "choose another --output-dir",
    ),
    "output-holds-file-in-the-way": (
        "ddp --output-dir mixed --overwrite",
        "--output-dir mixed: holds config.json, which no run wrote",
        "move it away",
    ),
    "port-of-single": ("single --master-port 29511", "--master-port 29511", "leave it out"),
    "config-missing": ("ddp --config nowhere.yaml", "--config nowhere.yaml", "No such file"),
    "config-is-directory": ("ddp --config config", "--config config", "this is no file"),
    "config-broken": ("ddp --config config/broken.yaml", "config/broken.yaml", "is not YAML or JSON"),
    "config-list": ("ddp --config config/list.yaml", "config/list.yaml", "must be a mapping of option names"),
    "config-empty": ("ddp --config config/empty.yaml", "config/empty.yaml", "must be a mapping of option names"),
    "config-number-as-name": ("ddp --config config/number-as-name.yaml", "number-as-name.yaml", "must be a mapping"),
    "config-misspelt": ("ddp --config config/misspelt.yaml", "'num_proceses'", "did you mean num_processes?"),
    "config-names-config": ("ddp --config config/itself.yaml", "config/itself.yaml", "there is no option 'config'"),
    "config-word-for-number": ("ddp --config config/word-for-number.yaml", "--num-processes many", "valid integer"),
    "config-list-for-number": ("ddp --config config/list-for-number.yaml", "--num-processes [1, 2]", "valid integer"),
    "config-yes-for-number": ("ddp --config config/yes-for-number.yaml", "--num-processes True", "as a boolean"),
    "config-null": ("ddp --config config/null.yaml", "train_file has no value", "leave the option out"),
    "config-number-for-name": ("ddp --config config/number-for-name.yaml", "--text-column 5", "valid string"),
    "config-choice": ("ddp --config config/choice.json", "--precision int4", "'fp32', 'bf16' or 'fp16'"),
    "config-word-for-flag": ("ddp --config config/word-for-flag.yaml", "--overwrite perhaps", "valid boolean"),
    "config-task": ("ddp --config config/task.yaml", "'summarise'", "choose text-classification"),
    "config-impossible-date": ("ddp --config config/impossible-date.yaml", "impossible-date.yaml", "not YAML or JSON"),
    "config-encoding": ("ddp --config config/latin1.yaml", "config/latin1.yaml", "utf-8"),
    "config-python-object": ("ddp --config config/python.yaml", "config/python.yaml", "not YAML or JSON"),
    "config-key-twice": ("ddp --config config/twice.yaml", "'seed' is given twice", "on line 1 and line 3"),
    "config-key-twice-json": ("ddp --config config/twice.json", "'seed' is given twice", "on line 1 and line 3"),
    "config-key-twice-spelt": ("ddp --config config/dash-and-underscore.yaml", "given twice", "line 1 and line 2"),
    "config-key-twice-deeper": ("ddp --config config/twice-deeper.yaml", "'a' is given twice"),
    "config-key-twice-race": ("compare --config config/twice.yaml", "'seed' is given twice"),
    "config-twice": ("ddp --config config/first.yaml --config config/choice.json", "--config: is given twice"),
    "config-twice-race": ("compare --config config/first.yaml --config config/first.yaml", "--config: is given twice"),
    "config-empty-name": ("ddp --config=", "--config: is empty", "name a path"),
    "config-sexagesimal": ("ddp --config config/sexagesimal.yaml", "--num-train-epochs 1:30", "valid integer"),
    "config-hexadecimal": ("ddp --config config/hexadecimal.yaml", "--num-train-epochs 0x10", "valid integer"),
    "config-octal": ("single --config config/octal.yaml", "--num-processes 3", "at most 1"),
    "config-half-number": ("ddp --config config/underscore.yaml", "--num-train-epochs 1_", "valid integer"),
    "config-two-documents": ("ddp --config config/two-documents.yaml", "is not YAML or JSON"),
    "config-tab": ("ddp --config config/tab.yaml", "is not YAML or JSON"),
    "config-json-comments": ("ddp --config config/comments.json", "is not YAML or JSON"),
    "config-utf16": ("ddp --config config/utf16.yaml", "utf-8"),
    "config-nested": ("ddp --config config/nested.yaml", "there is no option 'run'"),
    "config-byte-order-mark": ("single --config config/marked.yaml", "--num-processes 3", "at most 1"),
    "config-empty-path": ("ddp --config config/empty-path.yaml", "--output-dir: is empty", "name a path"),
    "config-home-data": ("single --config config/home.yaml", "{home}/nowhere.csv", "no such file"),
    "config-home-model": ("single --config config/home-model.yaml", "{home}/nowhere", "no such directory"),
    "config-home-resume": ("single --config config/home-resume.yaml", "{home}/nowhere", "no such file"),
    "config-home-output": ("single --config config/home-output.yaml", "{home}/foreign", "no run"),
    "home-of-config": ("ddp --config=~/nowhere.yaml", "{home}/nowhere.yaml", "No such file"),
    "home-of-output": ("ddp --output-dir=~/foreign", "{home}/foreign", "no run; choose another"),
    "home-of-data": ("single --train-file=~/no.csv --validation-file=~/no.csv", "{home}/no.csv", "no such file"),
    "home-of-resume": ("ddp --resume=~/nowhere", "{home}/nowhere", "no such file"),
    "home-of-report": ("report '~/nowhere.json'", "{home}/nowhere.json", "cannot be read"),
    "home-of-race": ("compare --config=~/nowhere.yaml", "{home}/nowhere.yaml", "No such file"),
    "home-of-collectives": ("allreduce --output=~/rows.csv", "{home}/rows.csv", "exists already"),
    "home-of-contract": ("contract ddp --json=~/rows.csv", "{home}/rows.csv", "exists already"),
    "output-empty": ("ddp --output-dir=", "--output-dir: is empty", "name a path"),
    "output-empty-race": ("compare --output-dir=", "--output-dir: is empty", "name a path"),
    "output-empty-report": ("report rows.csv --output-dir=", "--output-dir: is empty", "name a path"),
    "output-empty-collectives": ("allreduce --output=", "--output: is empty", "name a path"),
    "output-empty-contract": ("contract ddp --json=", "--json: is empty", "name a path"),
    "output-too-long-contract": (f"contract ddp --json {LONG_NAME}", LONG_NAME, "name too long"),
    "output-not-text": ("ddp --output-dir=a\udcff", "holds characters that no name can have"),
    "output-is-link-to-nowhere": ("ddp --output-dir dangling", "--output-dir dangling", "leads nowhere"),
    "output-is-circle-of-links": ("ddp --output-dir circle", "--output-dir circle", "leads nowhere"),
    "output-below-circle": ("ddp --output-dir circle/a", "circle", "is a link that leads nowhere"),
    "config-is-circle": ("ddp --config circle", "--config circle", "Too many levels of symbolic links"),
    "config-is-device": ("ddp --config /dev/zero", "--config /dev/zero", "this is no file"),
    "output-in-proc": ("single --task token-tagging --output-dir /proc/run", "/proc/run", "choose another path"),
    "record-name-too-long": (f"report {LONG_NAME}", LONG_NAME, "name too long"),
    "report-name-too-long": (f"report rows.csv --output-dir {LONG_NAME}", LONG_NAME, "name too long"),
    "report-target-nan": ("report rows.csv --target-accuracy nan", "--target-accuracy nan", "finite number"),
    "report-target-percent": ("report rows.csv --target-accuracy 90", "--target-accuracy 90", "or equal to 1"),
    "record-not-text": ("report 'a\udcff'", "holds characters that no name can have"),
    "option-after-dashes": ("ddp -- --seed 1", "unknown option --;", "--help"),
    "config-too-deep": ("ddp --config config/deep.yaml", "config/deep.yaml", "not YAML or JSON"),
}


@pytest.mark.parametrize("case", OPTION_CASES)
def test_option_is_refused(place: Place, lockstep: Callable[..., Outcome], case: str) -> None:
    arguments, *fragments = OPTION_CASES[case]
    with place.untouched():
        outcome = lockstep(*shlex.split(arguments))
        outcome.assert_refused(*(fragment.replace("{home}", str(place.work)) for fragment in fragments))


# id -> (arguments of lockstep, what the message must contain...): bad data and models.
DATA_CASES: dict[str, tuple[str, ...]] = {
    "device-cuda-without-gpu": ("ddp --device cuda", "--device cuda", "no GPU is visible", "--device cpu"),
    "train-file-missing": (_train_on("nowhere.csv"), "--train-file", "nowhere.csv", "there is no such file"),
    "validation-file-missing": (_validate_on("nowhere.csv"), "--validation-file", "nowhere.csv", "no such file"),
    "train-file-alone": ("single --train-file rows.csv", "--validation-file is missing", "a file each"),
    "validation-file-alone": ("single --validation-file rows.csv", "--train-file is missing", "a file each"),
    "file-is-directory": (_train_on("directory.csv"), "directory.csv", "not a file; name one"),
    "file-name-empty": (_train_on("''"), "--train-file: is empty", "name a path"),
    "file-name-too-long": (_train_on(LONG_NAME), LONG_NAME, "name too long"),
    "file-ending": (_train_on("rows.txt"), "rows.txt", "must be one of .csv, .tsv, .jsonl, .parquet"),
    "file-ending-in-capitals": (_validate_on("rows.CSV"), "--validation-file", "rows.CSV", "must be one of .csv"),
    "file-empty": (_train_on("empty.csv"), "empty.csv", "the file is empty"),
    "validation-file-empty": (_validate_on("empty.csv"), "--validation-file", "empty.csv", "the file is empty"),
    "file-of-one-blank-line": (_train_on("blank-line.csv"), "blank-line.csv", "Empty CSV file"),
    "file-of-one-header-csv": (_train_on("header.csv"), "header.csv", "there are no rows"),
    "file-of-one-header-tsv": (_validate_on("header.tsv"), "--validation-file", "header.tsv", "there are no rows"),
    "file-without-rows-parquet": (_train_on("no-rows.parquet"), "no-rows.parquet", "there are no rows"),
    "column-text-missing": (
        _train_on("review-column.csv"),
        "review-column.csv",
        "no column 'text'",
        "choose --text-column from review, label",
    ),
    "column-label-missing": (
        _validate_on("stars-column.csv"),
        "--validation-file",
        "stars-column.csv",
        "no column 'label'",
        "choose --label-column from text, stars",
    ),
    "column-named-wrong": (f"{_train_on('rows.csv')} --text-column body", "no column 'body'", "from text, label"),
    "column-missing-jsonl": (f"{_train_on('no-text.jsonl')} --label-column y", "no column 'y'", "from text, label"),
    "column-missing-parquet": (f"{_train_on('numbers.parquet')} --text-column x", "no column 'x'", "from text, label"),
    "column-twice": (_train_on("two-text-columns.csv"), "2 columns 'text'", "rename all but one"),
    "column-for-both": (f"{_train_on('rows.csv')} --text-column label", "are both 'label'", "name two columns"),
    "row-without-text-csv": (_train_on("no-text.csv"), "no-text.csv", "row 2 of 2 has no text", "complete such rows"),
    "row-without-text-jsonl": (_train_on("no-text.jsonl"), "no-text.jsonl", "row 2 of 2 has no text"),
    "row-without-text-key": (_train_on("text-key-absent.jsonl"), "text-key-absent.jsonl", "row 2 of 2 has no text"),
    "row-of-white-space": (_validate_on("white-space.csv"), "--validation-file", "row 2 of 2 has no text"),
    "row-without-label-csv": (_train_on("no-label.csv"), "no-label.csv", "row 2 of 2 has no label", "complete such"),
    "row-without-label-jsonl": (_validate_on("no-label.jsonl"), "no-label.jsonl", "row 2 of 2 has no label"),
    "text-all-null": (_train_on("only-nulls.jsonl"), "'text' holds null", "choose another --text-column"),
    "text-of-numbers-jsonl": (_train_on("numbers.jsonl"), "'text' holds int64", "choose another --text-column"),
    "text-of-numbers-parquet": (_train_on("numbers.parquet"), "'text' holds int64", "choose another --text-column"),
    "label-lists-jsonl": (_train_on("list-labels.jsonl"), "'label' holds list", "choose another --label-column"),
    "label-lists-parquet": (_train_on("list-labels.parquet"), "'label' holds list", "choose another --label-column"),
    "label-objects": (_train_on("object-labels.jsonl"), "'label' holds struct", "choose another --label-column"),
    "label-mixed": (_train_on("mixed-labels.jsonl"), "mixed-labels.jsonl", "column 'label'", "do not go together"),
    "label-only-one": (_train_on("one-label.csv"), "one-label.csv", "the label '1'", "two or more labels are needed"),
    "label-look-alikes": (
        _train_on("look-alikes.csv"),
        "' pos' (1 row), 'POS' (1 row), 'pos' (1 row) differ only in blanks, case",
        "make them one, or add --keep-labels",
    ),
    "label-number-spellings": (_train_on("number-spellings.csv"), "'1' (3 rows), '1.0' (1 row)", "--keep-labels"),
    "label-normal-forms": (_train_on("normal-forms.csv"), r"'cafe\u0301' (1 row), 'caf\xe9' (1 row)", "--keep-labels"),
    "label-missing": (_train_on("missing-labels.csv"), "'NaN' (1 row)", "a missing value", "--keep-labels"),
    "label-not-a-number": (_train_on("not-a-number.parquet"), "row 3 of 3 has no label"),
    "label-numbers-to-predict": (
        _train_on("number-each.csv"),
        "300 different labels in 300",
        "numbers to be predicted",
    ),
    "label-of-each-row": (_train_on("label-each.csv"), "300 different labels in 300", "names of rows", "--keep-labels"),
    "label-unseen": (_validate_on("unseen-label.csv"), "unseen-label.csv", "label '7' does not occur", "there: 0, 1"),
    "label-with-two-dashes": (_train_on("dashed-labels.csv"), "rows.csv", "label '0'", "there: --5, 5"),
    "encoding-csv": (_train_on("latin1.csv"), "latin1.csv", "not UTF-8", "iconv"),
    "encoding-tsv": (_train_on("latin1.tsv"), "latin1.tsv", "not UTF-8", "iconv"),
    "encoding-jsonl": (_validate_on("latin1.jsonl"), "--validation-file", "latin1.jsonl", "not UTF-8", "iconv"),
    "encoding-of-header": (_train_on("latin1-header.csv"), "latin1-header.csv", "not UTF-8", "iconv"),
    "encoding-utf16-csv": (_train_on("utf16.csv"), "utf16.csv", "not UTF-8", "iconv"),
    "encoding-utf16-jsonl": (_train_on("utf16.jsonl"), "utf16.jsonl", "not UTF-8", "iconv"),
    "broken-csv-long-row": (_train_on("too-many-fields.csv"), "row 2 (line 3) has 3 field(s)", "the header has 2"),
    "broken-tsv-short-row": (_train_on("too-few-fields.tsv"), "tab", "row 2 (line 3) has 1 field(s)"),
    "broken-csv-open-quote": (_train_on("open-quote.csv"), "open-quote.csv", "comma-separated"),
    "broken-csv-quote-that-swallows": (
        _train_on("swallowing-quote.csv"),
        "row 300001 (lines 300002 to 600002)",
        "is a quote in it not closed?",
    ),
    "broken-csv-semicolons": (_train_on("semicolons.csv"), "'text;label'", "has no ',' but ';'"),
    "broken-csv-tabs": (_train_on("tabs.csv"), "has no ',' but '\\t'"),
    "broken-csv-packed": (_train_on("packed.csv"), "packed.csv", "unpack it first"),
    "broken-csv-nul": (_train_on("nul.csv"), "row 1 of 2", "NUL character"),
    "broken-csv-utf16-without-mark": (_train_on("nul-header.csv"), "the first line holds a NUL", "not UTF-8?"),
    "broken-jsonl-key-twice": (_train_on("key-twice.jsonl"), "row 1", "'text' occurs twice"),
    "broken-jsonl-cut-off": (_train_on("cut-off.jsonl"), "cut-off.jsonl", "one JSON object in each line", "row 2"),
    "broken-jsonl-array": (_train_on("array.jsonl"), "array.jsonl", "one JSON object in each line"),
    "broken-parquet": (_validate_on("fake.parquet"), "--validation-file", "fake.parquet", "not a parquet file"),
    "column-twice-but-for-blanks": (_train_on("same-name.csv"), "2 columns 'label' (' label', 'label ')", "rename"),
    "dataset-and-files": (f"{_train_on('rows.csv')} --dataset complete", "complete", "not both"),
    "dataset-and-one-file": ("single --validation-file rows.csv --dataset complete", "complete", "not both"),
    "dataset-offline": ("single --dataset nowhere", "--dataset nowhere", "reach 'nowhere'", "or a directory"),
    "dataset-offline-config": ("single --dataset owner/nowhere:en", "--dataset owner/nowhere:en", "or a directory"),
    "dataset-path-missing": ("single --dataset /nowhere/data", "--dataset /nowhere/data", "or a directory"),
    "dataset-is-file": ("single --dataset rows.csv", "--dataset rows.csv", "use --train-file and --validation-file"),
    "dataset-empty-name": ("single --dataset ''", "--dataset ", "at least 1 character"),
    "dataset-directory-without-data": ("single --dataset no-data", "no-data", "data file", "or a directory"),
    "dataset-config-missing": ("single --dataset complete:en", "complete:en", "'en' not found", "'default'"),
    "dataset-without-validation": ("single --dataset only-train", "only-train", "validation (or test), has only train"),
    "dataset-column-missing": ("single --dataset other-columns", "(train)", "'label'", "from text, stars"),
    "dataset-damaged": ("single --dataset damaged", "damaged", "JSON parse error"),
    "dataset-labels-withheld": ("single --dataset withheld", "withheld (test)", "row 1 of 2 has no label"),
    "model-path-missing": ("single --model ./nowhere", "--model ./nowhere", "no such directory", "bert-tiny"),
    "model-offline": (
        "single --model owner/nowhere",
        "--model owner/nowhere",
        "neither a preset (bert-tiny",
        "OFFLINE",
    ),
    "model-misspelt": ("single --model bert-tny", "--model bert-tny", "neither a preset (bert-tiny", "hub did not"),
    "model-name-impossible": ("single --model 'a b'", "--model a b", "neither a preset (bert-tiny"),
    "model-name-of-two-lines": ("ddp --config config/two-lines.yaml", "--model first second", "neither a preset"),
    "model-name-empty": ("single --model ''", "--model ", "at least 1 character"),
    "model-name-too-long": (f"single --model {LONG_NAME}", LONG_NAME, "name too long"),
    "model-is-file": ("single --model rows.csv", "--model rows.csv", "this is a file", "config.json"),
    "model-without-config": (_fine_tune("model-without-config"), "model-without-config", "no config.json"),
    "model-without-weights": (_fine_tune("model-without-weights"), "model-without-weights", "no weights (model.safe"),
    "model-with-pickle": (_fine_tune("model-with-pickle"), "model-with-pickle", "convert others with save_pretrained"),
    "model-with-pointer": (_fine_tune("model-with-pointer"), "model.safetensors cannot be read", "fetch the model"),
    "model-without-tokenizer": (_fine_tune("model-without-tokenizer"), "no tokenizer", "with save_pretrained"),
    "model-without-vocabulary": (_fine_tune("model-without-vocabulary"), "no tokenizer", "with save_pretrained"),
    "model-with-broken-config": (_fine_tune("model-with-broken-config"), "config.json is not JSON", "fetch the model"),
    "model-with-list-as-config": (_fine_tune("model-with-list-as-config"), "config.json is no JSON object", "fetch"),
    "model-with-broken-tokenizer": (_fine_tune("model-with-broken-tokenizer"), "tokenizer cannot be loaded", "again"),
    "model-has-too-few-positions": (
        "single --model model --max-seq-length 65",
        "--max-seq-length 65",
        "64 positions",
        "choose 64 or less",
    ),
}


@pytest.mark.parametrize("case", DATA_CASES)
def test_data_are_refused(place: Place, case: str) -> None:
    arguments, *fragments = DATA_CASES[case]
    with place.untouched():
        run_forked(place, *shlex.split(arguments)).assert_refused(*fragments)


# id -> (what is on PYTHONPATH, arguments of lockstep, what the message must contain...)
PACKAGE_CASES = {
    "horovod-not-built": ("no-horovod", "horovod", "horovod is not built", "run launch/run.sh horovod"),
    "horovod-without-torch": ("bare-horovod", "horovod", "without its PyTorch extension", "run launch/run.sh horovod"),
    "horovod-with-port": (
        "horovod",
        "horovod --master-port 29511",
        "--master-port 29511",
        "horovodrun",
        "leave it out",
    ),
    "horovod-start-method": ("horovod", "horovod --start-method torchrun", "torchrun", "horovodrun or mpirun"),
    "accelerate-missing": ("no-accelerate", "accelerate", "accelerate is not installed", "pip install 'accelerate"),
    "accelerate-fp16-on-cpu": ("accelerate", "accelerate --precision fp16", "--precision fp16", "choose fp32 or bf16"),
    "apex-missing": ("no-apex", "apex", "apex is not installed", "nvcr.io/nvidia/pytorch:25.04-py3"),
    "apex-of-pypi": ("pyramid-apex", "apex", "PyPI's Pyramid toolkit", "pip uninstall apex", "25.04"),
    "apex-too-new": ("new-apex", "apex", "no amp or parallel", "25.04"),
    "apex-without-gpu": ("apex", "apex", "needs a CUDA GPU", "use ddp"),
    "own-backend-broken": ("own", "broken_syntax:Adapter", "'broken_syntax:Adapter'", "invalid syntax"),
    "own-backend-raises": ("own", "raising:Adapter", "'raising:Adapter'", "no licence found"),
    "own-backend-undeclared": ("own", "own_backend:Undeclared", "'own_backend:Undeclared'", "declares capabilities"),
    "own-task-raises": ("own", "ddp --task raising:Task", "'raising:Task'", "no licence found"),
}


@pytest.mark.parametrize("case", PACKAGE_CASES)
def test_is_refused_with_these_packages(place: Place, case: str) -> None:
    packages, arguments, *fragments = PACKAGE_CASES[case]
    with place.untouched():
        outcome = run(place, LOCKSTEP, *shlex.split(arguments), PYTHONPATH=str(place.packages / packages))
        outcome.assert_refused(*fragments)


@pytest.mark.parametrize("name", ["horovod", "accelerate", "apex"])
def test_a_missing_library_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.registry.find_spec", lambda _: None)
    reason = BACKENDS[name].unavailable_reason()
    assert reason is not None
    assert reason.startswith(f"{name} is not ")
    assert "\n" not in reason


# option -> (backend and task, a value too small, one too large)
INTEGERS = {
    "num-processes": ("ddp", "0", "1025"),
    "threads-per-rank": ("ddp", "0", "1025"),
    "master-port": ("ddp", "0", "65536"),
    "global-batch-size": ("ddp", "0", "1000000001"),
    "micro-batch-size": ("ddp", "0", "1000000001"),
    "eval-batch-size": ("ddp", "0", "1000000001"),
    "num-train-epochs": ("ddp", "0", "1000000001"),
    "max-steps": ("ddp", "0", "1000000001"),
    "logging-steps": ("ddp", "0", "1000000001"),
    "dataloader-num-workers": ("ddp", "-1", "1025"),
    "seed": ("ddp", "-1", "4294967296"),
    "max-seq-length": ("ddp", "3", "513"),
    "num-train-samples": ("ddp --task token-tagging", "0", "1000001"),
    "num-validation-samples": ("ddp --task token-tagging", "0", "1000001"),
    "hidden-size": ("ddp --task token-tagging", "0", "4097"),
}
FLOATS = {
    "timeout": ("ddp", "0", "1000001"),
    "max-grad-norm": ("ddp", "-0.5", "1e39"),
    "init-loss-scale": ("ddp", "0", "1e39"),
    "learning-rate": ("ddp", "0", "1e39"),
    "warmup-ratio": ("ddp", "-0.5", "1.01"),
    "weight-decay": ("ddp", "-0.5", "1e39"),
    "dropout": ("ddp", "-0.5", "1"),
    "momentum": ("ddp --optimizer sgd", "-0.5", "1"),
}
REMEDY = {
    ("max-steps", "0"): "give a positive number, or -1",
    ("max-steps", "-2"): "give a positive number, or -1",
    ("max-seq-length", "513"): "choose 512 or less",
}


def _number_cases() -> Iterator[tuple[str, str, str, str]]:
    """Yields (backend and task, option, value, remedy)."""
    huge = 40 * "9"
    for numbers, kind, beyond in ((INTEGERS, "valid integer", "valid integer"), (FLOATS, "valid number", "finite")):
        for option, (command, too_small, too_large) in numbers.items():
            values = {"many": kind, "": kind, "1,5": kind, "nan": beyond, "inf": beyond, "-inf": beyond}
            if numbers is INTEGERS:
                values["1.5"] = kind
            values |= {too_small: "greater than", "-2": "greater than", too_large: "less than", huge: "less than"}
            for value, remedy in values.items():
                overridden = REMEDY.get((option, "513" if (option, value) == ("max-seq-length", huge) else value))
                yield command, option, value, overridden or remedy


@pytest.mark.parametrize(
    ("command", "option", "value", "remedy"),
    [pytest.param(*case, id=f"{case[1]}={case[2]}") for case in _number_cases()],
)
def test_number_is_refused(
    command: str,
    option: str,
    value: str,
    remedy: str,
    place: Place,
    lockstep: Callable[..., Outcome],
) -> None:
    with place.untouched():
        lockstep(*command.split(), f"--{option}={value}").assert_refused(f"--{option} {value}", remedy)


def test_busy_port(place: Place) -> None:
    with socket.socket() as other, place.untouched():
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        outcome = run(place, LOCKSTEP, "ddp", "--master-port", str(port))
        outcome.assert_refused(f"--master-port {port}", "not free", "choose another")


def test_more_ranks_than_samples(place: Place) -> None:
    files = shlex.split("--train-file rows.csv --validation-file rows.csv")
    command = (LOCKSTEP, "ddp", *files, "--num-processes", "5", "--global-batch-size", "5")
    # The data are good, so a first call leaves them in the cache, prepared for the next.
    before = _content(place.work)
    run(place, *command)
    assert _content(place.work) == before
    with place.untouched():
        outcome = run(place, *command)
        outcome.assert_refused("--num-processes 5", "only 4 training samples", "at most as many ranks")


def test_what_does_not_suit_the_data(place: Place, lockstep: Callable[..., Outcome]) -> None:
    """What only the prepared data can tell; they may stay in the cache."""
    two = "single --train-file rows.csv --validation-file rows.csv"
    three = "single --train-file three-labels.csv --validation-file three-labels.csv"
    before = _content(place.work)
    for arguments, fragments in (
        (f"{two} --global-batch-size 100000", ("--global-batch-size 100000", "only 4 training samples")),
        (f"{two} --positive-label 7", ("--positive-label 7", "no such label", "0, 1")),
        (f"{three} --positive-label x", ("--positive-label x", "3 labels", "macro_f1")),
        (f"{three} --metric-for-best-model f1", ("--metric-for-best-model f1", "loss, accuracy, macro_f1, roc_auc")),
    ):
        lockstep(*shlex.split(arguments)).assert_refused(*fragments)
    assert _content(place.work) == before


def test_cache_that_cannot_be_written(place: Place) -> None:
    with place.untouched():
        outcome = run(place, LOCKSTEP, *shlex.split(_train_on("rows.csv")), LOCKSTEP_CACHE=str(place.work / "rows.csv"))
        outcome.assert_refused("rows.csv", "cannot be written", "set LOCKSTEP_CACHE")


@pytest.fixture
def old_python(tmp_path: Path) -> Path:
    """A directory with interpreters that behave as Python 3.9 does in the check of versions."""
    for name in ("python", "python3", "python3.10", "python3.11", "python3.12", "python3.13"):
        stub = tmp_path / name
        stub.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.18 && exit\nexit 1\n')
        stub.chmod(0o755)
    return tmp_path


def test_script_refuses_an_old_python(place: Place, old_python: Path) -> None:
    python, venv = str(old_python / "python3"), str(place.work / "venv")
    with place.untouched():
        outcome = run(place, "bash", RUN_SH, "ddp", PYTHON=python, LOCKSTEP_VENV=venv)
        outcome.assert_refused(f"PYTHON={python} is Python 3.9.18", "needs Python 3.10 to 3.13")


def test_script_refuses_a_missing_python(place: Place) -> None:
    with place.untouched():
        outcome = run(place, "bash", RUN_SH, "ddp", PYTHON="/nowhere/python", LOCKSTEP_VENV=str(place.work / "venv"))
        outcome.assert_refused("PYTHON=/nowhere/python", "needs Python 3.10 to 3.13")


def test_script_finds_only_old_pythons(place: Place, old_python: Path) -> None:
    path, venv = f"{old_python}:{place.environment['PATH']}", str(place.work / "venv")
    with place.untouched():
        outcome = run(place, "bash", RUN_SH, "doctor", PATH=path, LOCKSTEP_VENV=venv)
        outcome.assert_refused("python3 is Python 3.9.18", "no Python 3.10 to 3.13 on PATH", "PYTHON=")


def test_script_refuses_an_old_environment(place: Place, old_python: Path) -> None:
    (old_python / "bin").mkdir()
    (old_python / "python").rename(old_python / "bin" / "python")
    before = _content(old_python)
    with place.untouched():
        outcome = run(place, "bash", RUN_SH, "ddp", LOCKSTEP_VENV=str(old_python))
        outcome.assert_refused(f"{old_python} has Python 3.9.18", "needs 3.10 to 3.13", "LOCKSTEP_VENV")
    assert _content(old_python) == before


@pytest.mark.parametrize("backend", ["dpd", "--num-processes", "ddp.py"])
def test_script_refuses_an_unknown_backend(place: Place, backend: str) -> None:
    with place.untouched():
        outcome = run(place, "bash", RUN_SH, backend, LOCKSTEP_VENV=str(place.work / "venv"))
        outcome.assert_refused(
            f"'{backend}'",
            "choose single, ddp, apex, horovod or accelerate; contract, compare, report, allreduce or doctor",
        )


def test_script_wants_an_activated_environment(place: Place) -> None:
    with place.untouched():
        outcome = run(place, "bash", RUN_SH, "ddp", LOCKSTEP_VENV="active")
        outcome.assert_refused("LOCKSTEP_VENV=active", "no virtual environment is activated")
