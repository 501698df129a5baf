"""The files that the cases name: data, configurations, models, and packages that pose as others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from safetensors.numpy import save_file

from tests.launching import run_config

LONG_NAME = 300 * "x"
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
    "model-with-list-as-type": {"config.json": '{"model_type": []}'},
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


def write_input(directory: Path) -> None:
    """Writes data, configurations and models."""
    for name, content in TEXT_FILES.items():
        _write(directory / name, content)
    _write_models(directory)
    _write_parquet(directory)
    for name, target in {"dangling": "nowhere-at-all", "circle": "circle"}.items():
        (directory / name).symlink_to(target)


def write_packages(directory: Path) -> None:
    """Writes a directory to put on PYTHONPATH for each name."""
    for name, content in PACKAGES.items():
        _write(directory / name, content)


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


def train_on(file: str) -> str:
    return f"single --train-file {file} --validation-file rows.csv"


def validate_on(file: str) -> str:
    return f"single --train-file rows.csv --validation-file {file}"
