"""The options of the benchmark of collectives: what is understood, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from backends.capabilities import BackendSettings, Capabilities
from backends.ddp import DDPBackend
from backends.registry import find_backend
from compare.collectives.cluster import Cluster
from compare.collectives.measurement import Measurement
from compare.collectives.options import parse_sizes
from engines.command import planned
from engines.slurm import SlurmSettings
from tests.launching import lockstep


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1KB", [1024]),
        ("64", [64]),
        ("8B, 4KiB", [8, 4096]),
        ("1kb..64kb", [2**10, 2**12, 2**14, 2**16]),
        ("1KB..2KB", [1024, 2048]),
        ("1MB..1MB", [2**20]),
        ("64KB,1KB,1KB..4KB", [1024, 4096, 65536]),
        ("4GB", [2**32]),
    ],
)
def test_sizes_that_are_understood(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "named", "remedy"),
    [
        ("", "'' is not a size", "64KiB"),
        ("1XB", "'1XB' is not a size", "64KiB"),
        ("many", "many", "64KiB"),
        ("1KB,", "is not a size", "64KiB"),
        ("1.5MB", "1.5MB", "64KiB"),
        ("-1KB", "-1KB", "64KiB"),
        ("\u0661KB", "\u0661KB", "64KiB"),
        ("1KB..", "is not a size", "1KiB..256MiB"),
        ("1KB..2KB..4KB", "2KB..4KB", "64KiB"),
        ("4MB..1MB", "the range 4MB..1MB ends below", "write 1MB..4MB"),
        ("0", "0", "multiple of 4 bytes"),
        ("0KB..4KB", "0KB", "multiple of 4 bytes"),
        ("1001", "1001", "multiple of 4 bytes"),
        ("5GB", "5GB", "up to 4 GiB"),
        ("9" * 5000, "9999", "up to 4 GiB"),
    ],
)
def test_sizes_that_are_refused(text: str, named: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=r"choose|write|multiple") as caught:
        parse_sizes(text)
    assert named in str(caught.value)
    assert remedy in str(caught.value)


class ClashingSettings(BackendSettings):
    """An option that `allreduce` has, too, and that changes collectives."""

    of_collectives: ClassVar[frozenset[str]] = frozenset({"sizes"})
    sizes: int = 1


class ClashingBackend(DDPBackend):
    """Cannot be measured with options of its own."""

    name = "clashing"
    Settings = ClashingSettings


class NamesakeSettings(BackendSettings):
    """An option that `allreduce` has, too, but that changes no collective."""

    sizes: int = 1


class NamesakeBackend(DDPBackend):
    """Can be measured without its own options."""

    name = "namesake"
    Settings = NamesakeSettings


def test_an_option_of_the_same_name_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """The size is read as that of `allreduce`: it is the file that is refused."""
    (tmp_path / "there.json").write_text("mine")
    name = f"{__name__}:NamesakeBackend"
    done = lockstep("allreduce", "--backends", name, "--sizes", "1KiB", "--output", tmp_path / "there.json")
    assert (done.returncode, "exists already" in done.stderr) == (2, True)


def test_options_that_do_not_exist_cannot_change_collectives() -> None:
    with pytest.raises(TypeError, match=r"Wrong\.of_collectives: there is no option gone"):
        type("Wrong", (BackendSettings,), {"of_collectives": frozenset({"gone"})})


class PlacelessBackend(DDPBackend):
    """Runs nowhere."""

    name = "placeless"
    capabilities = Capabilities({"tpu": ("fp32",)}, start_methods=("torchrun",))


REFUSED = {
    "--backends pytorch": ("there is no backend 'pytorch'", "ddp"),
    "--backends ddp,": ("--backends ddp,: a value is empty", "separate values with single commas"),
    "--backends apex": ("--backends apex: cannot run here", "apex"),
    "--backends single": ("--num-processes 2: single runs at most 1", "choose another backend"),
    "--backends no.such:Thing": ("no.such:Thing", "PYTHONPATH"),
    "--backends tests.test_collectives_options:PlacelessBackend": (
        "--device cpu: ",
        "choose one of these or another backend",
    ),
    "--num-processes 1": ("--num-processes 1", "choose 2 or more"),
    "--num-processes 2,1": ("--num-processes 1", "choose 2 or more"),
    "--num-processes 0": ("--num-processes 0", "greater than or equal to 1"),
    "--num-processes -2": ("--num-processes -2", "greater than or equal to 1"),
    "--num-processes many": ("--num-processes many", "valid integer"),
    "--num-processes 2.5": ("--num-processes 2.5", "valid integer"),
    "--num-processes 65": ("--num-processes 65", "less than or equal to 64"),
    "--sizes 1XB": ("--sizes 1XB: '1XB' is not a size", "64KiB"),
    "--sizes 4MB..1MB": ("4MB..1MB", "1MB..4MB"),
    "--sizes 4": ("--sizes 4: 4 B", "8 bytes or more"),
    "--operations all_to_all": ("--operations all_to_all", "all_gather"),
    "--operations all_reduce,": ("--operations all_reduce,: a value is empty", "separate values with single commas"),
    "--device tpu": ("--device tpu", "'auto', 'cpu' or 'cuda'"),
    "--device cuda": ("--device cuda: no GPU", "use --device cpu"),
    "--start-method ssh": ("--start-method ssh", "fork, torchrun or spawn"),
    "--backends ddp --start-method horovodrun": ("--start-method horovodrun: ddp", "fork, torchrun or spawn"),
    "--bandwidth 1gbit": ("--bandwidth 1gbit", "--engine netns"),
    "--engine lsf": ("--engine lsf: there is no such engine", "netns"),
    "--engine kubernetes --image mine": ("--engine kubernetes", "could not read what to measure", "slurm"),
    "--num-nodes 2": ("--num-nodes 2", "add --engine"),
    "--hosts a:1,b:1": ("--hosts a:1,b:1", "--engine mpi"),
    "--engine slurm --bandwidth 1gbit": ("unrecognized arguments: --bandwidth 1gbit", "--help"),
    "--engine slurm --time 1": ("--time 1", "give at least 4 minutes"),
    "--engine slurm --num-nodes 3 --num-processes 4": ("--num-processes 4", "--num-nodes 3"),
    "--engine netns --num-nodes 1": ("--engine netns", "ask for two or more"),
    "--engine mpi": ("--hosts is missing", "a:4,b:4"),
    "--engine mpi --hosts 127.0.0.1:2,127.0.0.2:2 --num-processes 2": (
        "--num-processes 2",
        "leave --num-processes out",
    ),
    "--engine netns --bandwidth fast": ("--bandwidth fast", "10gbit"),
    "--engine netns --start-method spawn": ("--start-method spawn", "on several nodes"),
    "--threads-per-rank 0": ("--threads-per-rank 0", "greater than or equal to 1"),
    "--timeout 0": ("--timeout 0", "greater than or equal to 1"),
    "--timeout nan": ("--timeout nan", "finite number"),
    "--timeout soon": ("--timeout soon", "valid number"),
    "--seconds-per-point -1": ("--seconds-per-point -1", "greater than or equal to 0"),
    "--seconds-per-point inf": ("--seconds-per-point inf", "finite number"),
    "--output there.json": ("--output there.json: exists already", "choose another file"),
    "--output nowhere/out.json": ("there is no directory nowhere", "create it first"),
    f"--output {'x' * 300}": ("File name too long", "choose another file"),
    "--backends ddp,horovod --wait sleep": ("--wait sleep: this option belongs to horovod", "name that backend alone"),
    "--backends horovod --wait snooze": ("--wait snooze", "'spin' or 'sleep'"),
    "--backends ddp --transport shared-memory": ("unrecognized arguments: --transport shared-memory", "--help"),
    f"--backends {__name__}:ClashingBackend": ("its own options cannot be told from others", "--sizes"),
    "--size 1KB": ("unrecognized arguments: --size", "--help"),
    "everything": ("unrecognized arguments: everything", "--help"),
    "--sizes": ("--sizes", "--help"),
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_input_ends_with_one_line(tmp_path: Path, arguments: str) -> None:
    if arguments == "--backends apex" and find_backend("apex").unavailable_reason() is None:
        pytest.skip("apex is here")
    (tmp_path / "there.json").write_text("mine")
    done = lockstep("allreduce", *arguments.split(" "), cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    for part in REFUSED[arguments]:
        assert part in done.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"there.json": "mine"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_on_cpus_ask_a_cluster_for_no_gpus(device: str) -> None:
    cluster = Cluster("slurm", SlurmSettings(gpus_per_node=8), ("--gpus-per-node=8",), 2)
    facts = {"num_processes": 16, "threads_per_rank": 1, "timeout": 60.0, "start_method": "torchrun"}
    options = cluster.options(Measurement.model_construct(backend="ddp", device=device, **facts))
    assert ("--gpus-per-node=8" in options) == (device == "cuda")
    engine, _ = planned(["ddp", *options])
    engine.check()
