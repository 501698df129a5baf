"""Requests of a race that cannot be met: one line, exit code 2, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare.race.own_entrants import read_own_entrant
from launch.errors import UsageError
from tests.launching import lockstep


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--backends", "ddq"], "no backend 'ddq'"),
        (["--backends", "apex"], "--backends apex: cannot run here"),
        (["--backends", ""], "--backends"),
        (["--repeats", "0"], "--repeats 0"),
        (["--repeats", "2"], "--repeats 2: entrants that are started fewer than 3 times cannot be compared"),
        (["--entrant", "ddp"], "--entrant 'ddp': ddp takes part without options, too; give this one a name"),
        (["--grad-compression", "fp16"], "--grad-compression: cannot be set in a race: it leaves no exact entrant"),
        (["--entrant", "ddp:--grad-compression fp8"], "--grad-compression fp8"),
        (["--entrant", "=ddp"], "--entrant '=ddp': write it as [NAME=]BACKEND:OPTIONS"),
        (["--entrant", "dpd:--x 1"], "no backend 'dpd'"),
        (
            ["--entrant", "ddp:--opt-level O2"],
            "--opt-level is not an option in which entrants may differ",
        ),
        (
            ["--entrant", "apex:--max-steps 3"],
            "--max-steps is not an option in which entrants may differ",
        ),
        (["--entrant", "ddp:HOROVOD_CYCLE_TIME=5"], "HOROVOD_CYCLE_TIME is not a variable of ddp"),
        (["--entrant", "ddp:OMPI_MCA_mpi_yield_when_idle=1"], "OMPI_MCA_mpi_yield_when_idle is not a variable of ddp"),
        (["--entrant", "one=ddp:OMP_NUM_THREADS=1"], "OMP_NUM_THREADS would have no effect, since every job has its"),
        (["--entrant", "accelerate:ACCELERATE_CPU_AFFINITY=1"], "ACCELERATE_CPU_AFFINITY would have no effect"),
        (["--entrant", "x=ddp:CUDA_VISIBLE_DEVICES=0"], "CUDA_VISIBLE_DEVICES has no effect on ddp (x), which"),
        (
            ["--entrant", "ddp:--start-method mpirun"],
            "--start-method mpirun: ddp is started by fork, torchrun or spawn",
        ),
        (["--entrant", "horovod:5"], "'5' is neither an option (--name value) nor a variable (NAME=value)"),
        (["--entrant", "horovod:'x"], "No closing quotation; close the quotation"),
        (["--entrant", "a=ddp:NCCL_X=1", "--entrant", "a=ddp:NCCL_X=2"], "there are two entrants ddp (a)"),
        (
            ["--tune", "--num-processes", "2", "--entrant", "tuned=ddp:--bucket-cap-mb 5"],
            "there are two entrants ddp (tuned), 2 rank(s)",
        ),
        (["--bare", "--entrant", "by hand=ddp:--batching padded"], "there are two entrants ddp (by hand)"),
        (["--repeats", "x"], "--repeats x"),
        (["--num-processes", "1,zwei"], "--num-processes"),
        (["--num-processes", "0"], "--num-processes"),
        (["--precision", "fp8"], "--precision"),
        (["--accumulation", "3"], "--global-batch-size 32 is not a multiple"),
        (["--max-steps", "7"], "use --budget or --timed-steps"),
        (["--micro-batch-size=4"], "use --accumulation"),
        (["--timed-steps", "5"], "--timed-steps 5"),
        (["--budget", "soon"], "--budget soon: is not a duration; write it as 90s, 10min or 2h"),
        (["--budget", "0s"], "--budget 0s"),
        (["--until", "1%", "--timed-steps", "50"], "--until 1%: has no effect beside --timed-steps 50"),
        (
            ["--until", "1%", "--repeats", "3"],
            "--until 1%: has no effect beside --repeats 3, since 3 starts take place",
        ),
        (["--tune", "--num-processes", "1"], "--tune: has no effect, since nobody who takes part has several ranks"),
        (["--no-peer-accuracy"], "--no-peer-accuracy: has no effect without --peers"),
        (
            ["--task", "token-tagging", "--budget", "60s", "--timed-steps", "100000"],
            "--budget 60s: 3 starts of 100000 timed steps need about",
        ),
        (["--task", "token-tagging", "--budget", "9s"], "--budget 9s: "),
        (["--until", "3"], "--until 3: is not a percentage; write it as 3% or 0.5%"),
        (["--until", "200%"], "--until 200%"),
        (["--nonsense", "7"], "unknown option --nonsense"),
        (["--train-file", "none.csv", "--validation-file", "none.csv"], "none.csv"),
        (["--output-dir", "/proc/nothing/here"], "/proc/nothing/here"),
        (["--backends", "accelerate", "--precision", "fp16"], "accelerate cannot compute in fp16"),
        (["--tracker", "tensorboard"], "a race keeps only the records of its runs"),
        (["--trace", "3"], "a race keeps only the records of its runs"),
        (["--start-method", "spawn"], "by its own starter"),
        (["--train-file", "a" * 300, "--validation-file", "b"], "aaa"),
        (
            ["--repeats", "1000", "--num-processes", "1,2,4,8,16,32", "--precision", "fp32,bf16"],
            "exceed the limit of 10000 runs",
        ),
    ],
)
def test_bad_requests_end_with_one_line(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    done = lockstep("compare", "--backends", "single,ddp", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("lockstep: ")
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_entrant_may_have_a_start_method_and_variables_with_small_letters() -> None:
    own = read_own_entrant("MPI=horovod:--start-method mpirun OMPI_MCA_mpi_yield_when_idle=1")
    assert own.options == ("--start-method=mpirun",)
    assert own.variables == (("OMPI_MCA_mpi_yield_when_idle", "1"),)


def test_a_refusal_names_no_variables_that_would_be_refused() -> None:
    with pytest.raises(UsageError, match="NO_VARIABLE is not a variable of accelerate; those begin with ") as refused:
        read_own_entrant("accelerate:NO_VARIABLE=1")
    assert "NCCL_" in str(refused.value)
    assert not {"ACCELERATE_", "TOKENIZERS_PARALLELISM"} & set(str(refused.value).split(", "))


def test_a_configuration_file_leaves_to_the_race_what_it_decides(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("precision: bf16\n")
    done = lockstep("compare", "--backends", "single", "--config", tmp_path / "options.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "--precision: cannot be set in a race" in done.stderr
