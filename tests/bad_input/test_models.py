"""Models that are refused."""

from __future__ import annotations

import shlex

import pytest

from tests.bad_input.files import LONG_NAME, train_on
from tests.bad_input.place import Place, run_forked


def fine_tune(model: str) -> str:
    return f"{train_on('rows.csv')} --max-seq-length 32 --model {model}"


# id -> (arguments of lockstep, what the message must contain...).
MODEL_CASES: dict[str, tuple[str, ...]] = {
    "model-path-missing": ("single --model ./nowhere", "--model ./nowhere", "no such directory", "bert-tiny"),
    "model-offline": (
        "single --model owner/nowhere",
        "--model owner/nowhere",
        "neither a preset (bert-tiny",
        "OFFLINE",
    ),
    "model-misspelt": ("single --model bert-tny", "--model bert-tny", "neither a preset (bert-tiny", "from the hub"),
    "model-name-impossible": ("single --model 'a b'", "--model a b", "neither a preset (bert-tiny"),
    "model-name-of-two-lines": ("ddp --config config/two-lines.yaml", "--model first second", "neither a preset"),
    "model-name-empty": ("single --model ''", "--model ", "at least 1 character"),
    "model-name-too-long": (f"single --model {LONG_NAME}", LONG_NAME, "name too long"),
    "model-is-file": ("single --model rows.csv", "--model rows.csv", "this is a file", "config.json"),
    "model-without-config": (fine_tune("model-without-config"), "model-without-config", "no config.json"),
    "model-without-weights": (fine_tune("model-without-weights"), "model-without-weights", "no weights (model.safe"),
    "model-with-pickle": (
        fine_tune("model-with-pickle"),
        "model-with-pickle",
        "convert other formats with save_pretrained",
    ),
    "model-with-pointer": (fine_tune("model-with-pointer"), "model.safetensors cannot be read", "download the model"),
    "model-without-tokenizer": (fine_tune("model-without-tokenizer"), "no tokenizer", "with save_pretrained"),
    "model-without-vocabulary": (fine_tune("model-without-vocabulary"), "no tokenizer", "with save_pretrained"),
    "model-with-broken-config": (
        fine_tune("model-with-broken-config"),
        "config.json is not JSON",
        "download the model",
    ),
    "model-with-list-as-type": (
        fine_tune("model-with-list-as-type"),
        "config.json has the model_type []",
        "download the model",
    ),
    "model-with-list-as-config": (
        fine_tune("model-with-list-as-config"),
        "config.json is not a JSON object",
        "download",
    ),
    "model-with-broken-tokenizer": (fine_tune("model-with-broken-tokenizer"), "tokenizer cannot be loaded", "again"),
    "model-has-too-few-positions": (
        "single --model model --max-seq-length 65",
        "--max-seq-length 65",
        "64 positions",
        "choose 64 or less",
    ),
}


@pytest.mark.parametrize("case", MODEL_CASES)
def test_model_is_refused(place: Place, case: str) -> None:
    arguments, *fragments = MODEL_CASES[case]
    with place.untouched():
        run_forked(place, *shlex.split(arguments)).assert_refused(*fragments)
