"""Data that are refused: files, columns, labels, data sets."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from tests.bad_input.files import LONG_NAME, train_on, validate_on
from tests.bad_input.place import LOCKSTEP, Outcome, Place, content_of, run, run_forked

# id -> (arguments of lockstep, what the message must contain...).
DATA_CASES: dict[str, tuple[str, ...]] = {
    "device-cuda-without-gpu": ("ddp --device cuda", "--device cuda", "no GPU is visible", "--device cpu"),
    "train-file-missing": (train_on("nowhere.csv"), "--train-file", "nowhere.csv", "there is no such file"),
    "validation-file-missing": (validate_on("nowhere.csv"), "--validation-file", "nowhere.csv", "no such file"),
    "train-file-alone": ("single --train-file rows.csv", "--validation-file is missing", "each need a file"),
    "validation-file-alone": ("single --validation-file rows.csv", "--train-file is missing", "each need a file"),
    "file-is-directory": (train_on("directory.csv"), "directory.csv", "not a file; name a file"),
    "file-name-empty": (train_on("''"), "--train-file: is empty", "name a path"),
    "file-name-too-long": (train_on(LONG_NAME), LONG_NAME, "name too long"),
    "file-ending": (train_on("rows.txt"), "rows.txt", "must end in one of .csv, .tsv, .jsonl, .parquet"),
    "file-ending-in-capitals": (validate_on("rows.CSV"), "--validation-file", "rows.CSV", "must end in one of .csv"),
    "file-empty": (train_on("empty.csv"), "empty.csv", "the file is empty"),
    "validation-file-empty": (validate_on("empty.csv"), "--validation-file", "empty.csv", "the file is empty"),
    "file-of-one-blank-line": (train_on("blank-line.csv"), "blank-line.csv", "Empty CSV file"),
    "file-of-one-header-csv": (train_on("header.csv"), "header.csv", "there are no rows"),
    "file-of-one-header-tsv": (validate_on("header.tsv"), "--validation-file", "header.tsv", "there are no rows"),
    "file-without-rows-parquet": (train_on("no-rows.parquet"), "no-rows.parquet", "there are no rows"),
    "column-text-missing": (
        train_on("review-column.csv"),
        "review-column.csv",
        "no column 'text'",
        "choose --text-column from review, label",
    ),
    "column-label-missing": (
        validate_on("stars-column.csv"),
        "--validation-file",
        "stars-column.csv",
        "no column 'label'",
        "choose --label-column from text, stars",
    ),
    "column-named-wrong": (f"{train_on('rows.csv')} --text-column body", "no column 'body'", "from text, label"),
    "column-missing-jsonl": (f"{train_on('no-text.jsonl')} --label-column y", "no column 'y'", "from text, label"),
    "column-missing-parquet": (f"{train_on('numbers.parquet')} --text-column x", "no column 'x'", "from text, label"),
    "column-twice": (train_on("two-text-columns.csv"), "2 columns are named 'text'", "rename all but one"),
    "column-for-both": (
        f"{train_on('rows.csv')} --text-column label",
        "are both 'label'",
        "name two different columns",
    ),
    "row-without-text-csv": (train_on("no-text.csv"), "no-text.csv", "row 2 of 2 has no text", "complete such rows"),
    "row-without-text-jsonl": (train_on("no-text.jsonl"), "no-text.jsonl", "row 2 of 2 has no text"),
    "row-without-text-key": (train_on("text-key-absent.jsonl"), "text-key-absent.jsonl", "row 2 of 2 has no text"),
    "row-of-white-space": (validate_on("white-space.csv"), "--validation-file", "row 2 of 2 has no text"),
    "row-without-label-csv": (train_on("no-label.csv"), "no-label.csv", "row 2 of 2 has no label", "complete such"),
    "row-without-label-jsonl": (validate_on("no-label.jsonl"), "no-label.jsonl", "row 2 of 2 has no label"),
    "text-all-null": (train_on("only-nulls.jsonl"), "'text' holds null", "choose another --text-column"),
    "text-of-numbers-jsonl": (train_on("numbers.jsonl"), "'text' holds int64", "choose another --text-column"),
    "text-of-numbers-parquet": (train_on("numbers.parquet"), "'text' holds int64", "choose another --text-column"),
    "label-lists-jsonl": (train_on("list-labels.jsonl"), "'label' holds list", "choose another --label-column"),
    "label-lists-parquet": (train_on("list-labels.parquet"), "'label' holds list", "choose another --label-column"),
    "label-objects": (train_on("object-labels.jsonl"), "'label' holds struct", "choose another --label-column"),
    "label-mixed": (train_on("mixed-labels.jsonl"), "mixed-labels.jsonl", "column 'label'", "mixes types"),
    "label-only-one": (train_on("one-label.csv"), "one-label.csv", "the label '1'", "at least two labels are needed"),
    "label-look-alikes": (
        train_on("look-alikes.csv"),
        "' pos' (1 row), 'POS' (1 row), 'pos' (1 row) differ only in white space, case",
        "give them one spelling, or add --keep-labels",
    ),
    "label-number-spellings": (train_on("number-spellings.csv"), "'1' (3 rows), '1.0' (1 row)", "--keep-labels"),
    "label-normal-forms": (train_on("normal-forms.csv"), r"'cafe\u0301' (1 row), 'caf\xe9' (1 row)", "--keep-labels"),
    "label-missing": (train_on("missing-labels.csv"), "'NaN' (1 row)", "a missing value", "--keep-labels"),
    "label-not-a-number": (train_on("not-a-number.parquet"), "row 3 of 3 has no label"),
    "label-numbers-to-predict": (
        train_on("number-each.csv"),
        "300 different labels in 300",
        "numbers to be predicted",
    ),
    "label-of-each-row": (train_on("label-each.csv"), "300 different labels in 300", "names of rows", "--keep-labels"),
    "label-unseen": (validate_on("unseen-label.csv"), "unseen-label.csv", "label '7' does not occur", "labels (0, 1)"),
    "label-with-two-dashes": (train_on("dashed-labels.csv"), "rows.csv", "label '0'", "labels (--5, 5)"),
    "encoding-csv": (train_on("latin1.csv"), "latin1.csv", "not UTF-8", "iconv"),
    "encoding-tsv": (train_on("latin1.tsv"), "latin1.tsv", "not UTF-8", "iconv"),
    "encoding-jsonl": (validate_on("latin1.jsonl"), "--validation-file", "latin1.jsonl", "not UTF-8", "iconv"),
    "encoding-of-header": (train_on("latin1-header.csv"), "latin1-header.csv", "not UTF-8", "iconv"),
    "encoding-utf16-csv": (train_on("utf16.csv"), "utf16.csv", "not UTF-8", "iconv"),
    "encoding-utf16-jsonl": (train_on("utf16.jsonl"), "utf16.jsonl", "not UTF-8", "iconv"),
    "broken-csv-long-row": (train_on("too-many-fields.csv"), "row 2 (line 3) has 3 field(s)", "the header has 2"),
    "broken-tsv-short-row": (train_on("too-few-fields.tsv"), "tab", "row 2 (line 3) has 1 field(s)"),
    "broken-csv-open-quote": (train_on("open-quote.csv"), "open-quote.csv", "comma-separated"),
    "broken-csv-quote-that-swallows": (
        train_on("swallowing-quote.csv"),
        "row 300001 (lines 300002 to 600002)",
        "is a quote in it not closed?",
    ),
    "broken-csv-semicolons": (train_on("semicolons.csv"), "'text;label'", "has no ',' but ';'"),
    "broken-csv-tabs": (train_on("tabs.csv"), "has no ',' but '\\t'"),
    "broken-csv-packed": (train_on("packed.csv"), "packed.csv", "decompress it first"),
    "broken-csv-nul": (train_on("nul.csv"), "row 1 of 2", "NUL character"),
    "broken-csv-utf16-without-mark": (train_on("nul-header.csv"), "the first line contains a NUL", "not UTF-8?"),
    "broken-jsonl-key-twice": (train_on("key-twice.jsonl"), "row 1", "'text' occurs twice"),
    "broken-jsonl-cut-off": (train_on("cut-off.jsonl"), "cut-off.jsonl", "one JSON object on each line", "row 2"),
    "broken-jsonl-array": (train_on("array.jsonl"), "array.jsonl", "one JSON object on each line"),
    "broken-parquet": (validate_on("fake.parquet"), "--validation-file", "fake.parquet", "not a parquet file"),
    "column-twice-but-for-blanks": (
        train_on("same-name.csv"),
        "2 columns are named 'label' (' label', 'label ')",
        "rename",
    ),
    "dataset-and-files": (f"{train_on('rows.csv')} --dataset complete", "complete", "not both"),
    "dataset-and-one-file": ("single --validation-file rows.csv --dataset complete", "complete", "not both"),
    "dataset-offline": ("single --dataset nowhere", "--dataset nowhere", "reach 'nowhere'", "or a directory"),
    "dataset-offline-config": ("single --dataset owner/nowhere:en", "--dataset owner/nowhere:en", "or a directory"),
    "dataset-path-missing": ("single --dataset /nowhere/data", "--dataset /nowhere/data", "or a directory"),
    "dataset-is-file": ("single --dataset rows.csv", "--dataset rows.csv", "use --train-file and --validation-file"),
    "dataset-empty-name": ("single --dataset ''", "--dataset ", "at least 1 character"),
    "dataset-directory-without-data": ("single --dataset no-data", "no-data", "data file", "or a directory"),
    "dataset-config-missing": ("single --dataset complete:en", "complete:en", "'en' not found", "'default'"),
    "dataset-without-validation": (
        "single --dataset only-train",
        "only-train",
        "validation (or test), but has only train",
    ),
    "dataset-column-missing": ("single --dataset other-columns", "(train)", "'label'", "from text, stars"),
    "dataset-damaged": ("single --dataset damaged", "damaged", "JSON parse error"),
    "dataset-labels-withheld": ("single --dataset withheld", "withheld (test)", "row 1 of 2 has no label"),
}


@pytest.mark.parametrize("case", DATA_CASES)
def test_data_are_refused(place: Place, case: str) -> None:
    arguments, *fragments = DATA_CASES[case]
    with place.untouched():
        run_forked(place, *shlex.split(arguments)).assert_refused(*fragments)


def test_more_ranks_than_samples(place: Place) -> None:
    files = shlex.split("--train-file rows.csv --validation-file rows.csv")
    command = (LOCKSTEP, "ddp", *files, "--num-processes", "5", "--global-batch-size", "5")
    # The data are good, so a first call leaves them in the cache, prepared for the next.
    before = content_of(place.work)
    run(place, *command)
    assert content_of(place.work) == before
    with place.untouched():
        outcome = run(place, *command)
        outcome.assert_refused("--num-processes 5", "only 4 training samples", "at most as many ranks")


def test_what_does_not_suit_the_data(place: Place, lockstep: Callable[..., Outcome]) -> None:
    """What only the prepared data can tell; they may stay in the cache."""
    two = "single --train-file rows.csv --validation-file rows.csv"
    three = "single --train-file three-labels.csv --validation-file three-labels.csv"
    before = content_of(place.work)
    for arguments, fragments in (
        (f"{two} --global-batch-size 100000", ("--global-batch-size 100000", "only 4 training samples")),
        (f"{two} --positive-label 7", ("--positive-label 7", "no such label", "0, 1")),
        (f"{three} --positive-label x", ("--positive-label x", "3 labels", "macro_f1")),
        (f"{three} --metric-for-best-model f1", ("--metric-for-best-model f1", "loss, accuracy, macro_f1, roc_auc")),
    ):
        lockstep(*shlex.split(arguments)).assert_refused(*fragments)
    assert content_of(place.work) == before
