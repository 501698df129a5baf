"""Options that are refused, of every command."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from tests.bad_input.place import Outcome, Place

# id -> (arguments of lockstep, what the message must contain...).
OPTION_CASES: dict[str, tuple[str, ...]] = {
    "momentum-without-sgd": ("ddp --momentum 0.9", "--momentum 0.9", "--optimizer sgd"),
    "trace-of-diagnosis": ("ddp --trace 3 --diagnose", "--trace 3", "--diagnose", "leave one of the two out"),
    "compression-choice": (
        "ddp --grad-compression fp8",
        "--grad-compression fp8",
        "'none', 'fp16', 'bf16' or 'powersgd'",
    ),
    "compression-of-nothing": (
        "single --grad-compression fp16",
        "--grad-compression fp16",
        "it sends none",
        "choose none, or another backend",
    ),
    "compression-of-one-rank": (
        "ddp --num-processes 1 --grad-compression fp16",
        "--grad-compression fp16",
        "one rank sends no gradients",
    ),
    "compression-not-of-horovod": (
        "horovod --grad-compression powersgd",
        "--grad-compression powersgd",
        "choose none or fp16, or another backend",
    ),
    "compression-not-of-fsdp2": ("fsdp2 --grad-compression bf16", "--grad-compression bf16", "adds micro-batches up"),
    "compression-in-shared-memory": (
        "ddp --transport shared-memory --grad-compression fp16",
        "--transport shared-memory",
        "--grad-compression fp16",
        "leave one of the two out",
    ),
    "rows-that-are-compressed": (
        "accelerate --embedding-gradients rows --grad-compression bf16",
        "--embedding-gradients rows",
        "--grad-compression bf16",
        "choose --embedding-gradients whole",
    ),
    "rows-in-shared-memory": (
        "ddp --transport shared-memory --embedding-gradients rows",
        "--transport shared-memory",
        "--embedding-gradients rows",
        "choose --embedding-gradients whole",
    ),
    "rows-of-fsdp2": ("fsdp2 --embedding-gradients rows", "unknown option --embedding-gradients"),
    "columns-of-embeddings": ("ddp --embedding-gradients columns", "--embedding-gradients columns", "rows"),
    "powersgd-in-fp16": ("ddp --grad-compression powersgd --precision fp16", "powersgd", "--precision fp16"),
    "powersgd-that-skips": ("ddp --grad-compression powersgd --on-nan skip", "powersgd", "--on-nan skip"),
    "powersgd-of-unused-parameters": (
        "ddp --grad-compression powersgd --find-unused-parameters",
        "powersgd",
        "--find-unused-parameters",
    ),
    "backend-unknown": ("dpd", "'dpd'", "choose single, dp, ddp, fsdp2, apex, horovod, accelerate, fabric, deepspeed"),
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
    "flag-with-value": ("ddp --overwrite=yes", "--overwrite", "'yes'"),
    "argument-stray": ("ddp 4", "unknown option 4", "--help"),
    "value-with-line-break": ("ddp --num-processes '1\n2'", "--num-processes 1 2", "valid integer"),
    "device-choice": ("ddp --device tpu", "--device tpu", "'auto', 'cpu' or 'cuda'"),
    "device-empty": ("ddp --device ''", "--device ", "'auto', 'cpu' or 'cuda'"),
    "precision-choice": ("ddp --precision fp8", "--precision fp8", "'fp32', 'bf16' or 'fp16'"),
    "batching-choice": ("ddp --batching folded", "--batching folded", "'packed', 'sorted' or 'padded'"),
    "allocator-choice": ("ddp --allocator malloc", "--allocator malloc", "'auto', 'glibc', 'tcmalloc' or 'jemalloc'"),
    "optimizer-choice": ("ddp --optimizer lamb", "--optimizer lamb", "'adamw' or 'sgd'"),
    "lr-scheduler-choice": ("ddp --lr-scheduler step", "--lr-scheduler step", "'linear', 'cosine' or 'constant'"),
    "start-method-of-another": (
        "ddp --start-method horovodrun",
        "--start-method horovodrun",
        "fork, torchrun or spawn",
    ),
    "start-method-empty": ("ddp --start-method ''", "--start-method ", "fork, torchrun or spawn"),
    "start-method-single": ("single --start-method spawn", "--start-method spawn", "started by python"),
    "task-unknown": (
        "ddp --task summarise",
        "'summarise'",
        "choose text-classification, token-tagging, image-classification",
    ),
    "task-empty": ("ddp --task ''", "there is no task ''", "choose text-classification"),
    "task-module-missing": ("ddp --task nowhere:Task", "'nowhere:Task'", "PYTHONPATH"),
    "task-module-unnamed": ("ddp --task :Task", "':Task'", "cannot be imported"),
    "task-no-subclass": ("ddp --task pathlib:Path", "'pathlib:Path'", "not a subclass of tasks.interface.Task"),
    "single-with-two-ranks": ("single --num-processes 2", "--num-processes 2", "at most 1", "choose another backend"),
    "global-batch-and-ranks": (
        "ddp --num-processes 3",
        "--global-batch-size 32",
        "3 ranks",
        "choose a multiple of 3, or change --num-processes",
    ),
    "global-batch-and-micro-batch": (
        "ddp --num-processes 2 --micro-batch-size 3",
        "--global-batch-size 32",
        "--micro-batch-size 3 x 2 ranks = 6",
        "change one of the three",
    ),
    "port-of-single": ("single --master-port 29511", "--master-port 29511", "leave it out"),
    "option-after-dashes": ("ddp -- --seed 1", "unknown option --;", "--help"),
}


@pytest.mark.parametrize("case", OPTION_CASES)
def test_option_is_refused(place: Place, lockstep: Callable[..., Outcome], case: str) -> None:
    arguments, *fragments = OPTION_CASES[case]
    with place.untouched():
        outcome = lockstep(*shlex.split(arguments))
        outcome.assert_refused(*(fragment.replace("{home}", str(place.work)) for fragment in fragments))
