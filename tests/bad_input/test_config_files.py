"""Configuration files that are refused."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from tests.bad_input.place import Outcome, Place

# id -> (arguments of lockstep, what the message must contain...).
CONFIG_CASES: dict[str, tuple[str, ...]] = {
    "config-without-value": ("ddp --config", "--config", "expected one argument"),
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
    "config-is-circle": ("ddp --config circle", "--config circle", "Too many levels of symbolic links"),
    "config-is-device": ("ddp --config /dev/zero", "--config /dev/zero", "this is no file"),
    "config-too-deep": ("ddp --config config/deep.yaml", "config/deep.yaml", "not YAML or JSON"),
}


@pytest.mark.parametrize("case", CONFIG_CASES)
def test_config_file_is_refused(place: Place, lockstep: Callable[..., Outcome], case: str) -> None:
    arguments, *fragments = CONFIG_CASES[case]
    with place.untouched():
        outcome = lockstep(*shlex.split(arguments))
        outcome.assert_refused(*(fragment.replace("{home}", str(place.work)) for fragment in fragments))
