"""``launch/run.sh verify``, and the contract on a task of one's own: does this very training compute what one does?"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from torch import nn

from backends.devices import count_gpus
from parity.causes import dropping, normalising
from records.processor import SLOW_BF16, is_slow
from tests.launching import EXAMPLES, lockstep, require_backend

SMALL = "--task token-tagging --global-batch-size 16 --micro-batch-size 4 --verify-steps 6"
STRAYING = "tests.variants_of_ddp:StrayingDDP"


def test_a_run_that_trains_what_one_process_trains(tmp_path: Path) -> None:
    """In float64, with accumulation, and with options of the run, of the backend and of the task."""
    target = tmp_path / "verdict.json"
    options = (*shlex.split(SMALL), "--bucket-cap-mb", "0.5", "--hidden-size", "9", "--json", target)
    done = lockstep("verify", "ddp", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SAME: ddp on 2 ranks trains what one process trains, up to rounding, in each of 6 steps" in done.stdout
    assert "the last step of an epoch" not in done.stdout  # the third step has 12 of 16 samples
    facts = json.loads(target.read_text())
    assert (facts["verdict"], facts["num_steps"], facts["num_processes"], facts["causes"]) == ("rounding", 6, 2, [])
    # One training under the backend, and two in one process: on whole batches, and in micro-batches of a rank.
    assert re.findall(r"training: (\w+)", done.stdout) == ["ddp", "single", "single"]
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("options", ["--precision bf16", "--precision fp16 --init-loss-scale 1024"])
def test_half_precision_is_compared_with_half_precision(options: str) -> None:
    done = lockstep("verify", "ddp", *shlex.split(SMALL), "--dtype", "float32", *options.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SAME: " in done.stdout
    precision = options.split()[1]
    is_told = f"bf16: {SLOW_BF16}" in done.stdout.splitlines()
    assert is_told == is_slow(precision, "cuda" if count_gpus() else "cpu")


@pytest.mark.parametrize("options", ["", "--precision bf16 --dtype float32"])
def test_one_percent_too_much_is_seen_with_the_options_of_a_training(options: str) -> None:
    """AdamW and clipping hide it from the weights, and half precision is coarse: the gradient's norm shows it."""
    done = lockstep("verify", STRAYING, *shlex.split(SMALL), *options.split())
    assert done.returncode == 1, done.stdout
    assert "DIFFERENT: " in done.stdout


def test_compressed_gradients_are_an_approximation() -> None:
    done = lockstep("verify", "ddp", *shlex.split(SMALL), "--dtype", "float32", "--grad-compression", "bf16")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "APPROXIMATE: ddp on 2 ranks" in done.stdout
    assert "% of the way that training moved the reference's" in done.stdout


def test_a_training_in_which_no_weight_moves_proves_nothing() -> None:
    done = lockstep("verify", "ddp", *shlex.split(SMALL), "--warmup-ratio", "1", "--learning-rate", "1e-30")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no weight moved in any step" in done.stdout


def test_more_samples_in_a_batch_than_there_are() -> None:
    """The global batch is the whole of ten samples, which a second reference still has to split."""
    few = SMALL.replace("--global-batch-size 16 --micro-batch-size 4", "--num-train-samples 10")
    done = lockstep("verify", "ddp", *shlex.split(few))
    assert done.returncode == 0, done.stdout + done.stderr


def test_overflows_that_depend_on_the_split_are_no_verdict() -> None:
    done = lockstep("verify", "ddp", *shlex.split(SMALL), "--dtype", "float32", "--precision", "fp16")
    assert done.returncode == 1
    assert "UNKNOWN: it cannot be told whether ddp on 2 ranks trains what one process trains" in done.stdout
    assert "give a smaller --init-loss-scale than 65536" in done.stdout


def test_the_step_and_the_weight_that_differ_are_named() -> None:
    plain = "--optimizer sgd --max-grad-norm 0 --warmup-ratio 0"
    done = lockstep("verify", STRAYING, *shlex.split(f"{SMALL} {plain}"))
    assert done.returncode == 1
    assert re.search(r"DIFFERENT: \S+ on 2 ranks .* from step 1 on, first in (mixer|embedding)", done.stdout)
    assert "times as far from the reference as rounding explains" in done.stdout


def test_what_in_the_model_depends_on_the_split_is_named() -> None:
    done = lockstep("verify", "ddp", *shlex.split(SMALL.replace("token-tagging", "tests.normed:NormedTask")))
    assert done.returncode == 1
    assert "a likely cause: 1 layer normalises each micro-batch by its own statistics (norm)" in done.stdout


def test_causes_are_those_of_the_model() -> None:
    innocent = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0), nn.LayerNorm(2), nn.LSTM(2, 2))
    assert normalising(innocent) + dropping(innocent) == []
    model = nn.Sequential(nn.Dropout(0.1), nn.MultiheadAttention(2, 1, dropout=0.1), *[nn.BatchNorm1d(2)] * 4)
    (normalise,), (drop,) = normalising(model), dropping(model)
    assert normalise.startswith("1 layer normalises each micro-batch by its own statistics (2)")
    assert drop.startswith("2 layers drop elements at random (0, 1)")


def test_it_says_that_the_short_step_of_an_epoch_is_not_reached() -> None:
    """Of 44 samples, the sixth step of an epoch has only 4."""
    done = lockstep("verify", "ddp", "--task", "token-tagging", "--global-batch-size", "8", "--verify-steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    said = "the last step of an epoch, which has only 4 of 8 samples; --verify-steps 6 would reach it"
    assert said in " ".join(done.stdout.split())


def test_dropout_is_left_out_where_its_masks_depend_on_the_split() -> None:
    done = lockstep("verify", "ddp", *shlex.split(SMALL), "--dropout", "0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: dropout, whose masks depend on how a batch is split" in done.stdout


def test_a_run_that_has_finished_is_no_reason_for_a_traceback(tmp_path: Path) -> None:
    run = ("--output-dir", tmp_path / "run")
    done = lockstep("single", *["--task", "token-tagging", "--max-steps", "2", "--save-every", "1"], *run)
    assert done.returncode == 0, done.stderr
    done = lockstep("verify", "single", *run, "--resume")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("lockstep: --resume: verify trains from the beginning; leave it out (")
    assert len(done.stderr.splitlines()) == 1


def test_a_training_that_fails_is_named_and_its_logs_are_kept() -> None:
    done = lockstep("verify", "tests.variants_of_ddp:FailingDDP", *shlex.split(SMALL))
    assert done.returncode == 1
    assert "did not complete: " in done.stderr
    assert "planted failure" in done.stderr
    (place,) = re.findall(r"the logs of its ranks are in (\S+)", done.stderr)
    assert list(Path(place).glob("run-1/logs/*"))


def test_a_task_of_ones_own_is_proven_at_every_number_of_ranks(tmp_path: Path) -> None:
    target = tmp_path / "proofs.json"
    options = ("--task", "spirals:SpiralsTask", "--num-points", "60", "--precision", "fp32", "--json", target)
    done = lockstep("contract", "ddp", *options, "--num-processes", "1,3", env=EXAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ddp, spirals:SpiralsTask: 4 passed"
    proofs = json.loads(target.read_text())["proofs"]
    assert [(one["num_processes"], one["micro_batch_size"]) for one in proofs] == [(1, 16), (1, 8), (3, 6), (3, 3)]
    assert all(one["state"] == "passed" for one in proofs)


def test_a_task_that_an_adapter_trains_wrongly_fails() -> None:
    options = ("--task", "spirals:SpiralsTask", "--num-points", "60", "--precision", "fp32", "--num-processes", "2")
    done = lockstep("contract", STRAYING, *options, env=EXAMPLES)
    assert done.returncode == 1
    assert f"{STRAYING} is not proven to train spirals:SpiralsTask as one process does" in done.stderr
    assert done.stdout.splitlines()[-1] == f"{STRAYING}, spirals:SpiralsTask: 2 failed"
    assert "DIFFERENT: " in done.stdout


def test_what_a_backend_does_not_support_is_said() -> None:
    require_backend("accelerate")
    options = ("--task", "spirals:SpiralsTask", "--num-points", "60", "--precision", "fp16", "--num-processes", "2")
    done = lockstep("contract", "accelerate", *options, env=EXAMPLES)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "accelerate, spirals:SpiralsTask: 2 unsupported"
    assert "nothing was proven" in done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("verify", "name a backend first"),
        ("verify --num-processes 2 ddp", "name a backend first"),
        ("verify nothing", "there is no backend 'nothing'"),
        ("verify ddp --verify-steps 0", "--verify-steps 0"),
        ("verify ddp --presicion fp16", "did you mean --precision?"),
        ("verify ddp --resume", "--resume"),
        ("verify ddp --output-dir x", "--output-dir x: verify keeps nothing of its runs"),
        ("verify ddp --num-nodes 2 --num-processes 2 --master-addr here", "--num-nodes 2: verify starts all ranks"),
        ("verify ddp --json /nowhere/at/all.json", "there is no directory /nowhere/at"),
        ("verify ddp --task tests.normed:Nothing", "tests.normed:Nothing"),
        ("verify ddp --task tasks.classification:Classification", "'tasks.classification:Classification' lacks name, "),
        ("contract ddp --task nowhere:Task", "'nowhere:Task' cannot be imported"),
        ("contract ddp --task token-tagging --check C16", "--check C16 names clauses"),
        ("contract ddp --task token-tagging --num-points 3", "--num-points 3"),
        ("contract ddp --task token-tagging --num-train-samples 10", "only 10 training samples"),
        ("contract single --task token-tagging --num-processes 2", "--num-processes 2: single runs at most 1"),
        ("contract ddp --num-points 3", "--num-points 3"),
    ],
)
def test_bad_requests_end_in_one_line(tmp_path: Path, command: str, words: str) -> None:
    done = lockstep(*shlex.split(command), cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert words in done.stderr
    assert not list(tmp_path.iterdir())
