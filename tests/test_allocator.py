"""The memory allocator of the ranks: found, refused, put before what the user loads, and in force."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from compare.collectives.measurement import read_collectives
from launch import allocator
from launch.allocator import Allocator, describe_allocator, settle_allocator
from launch.doctor import run as doctor
from launch.errors import UsageError
from launch.starters.environment import starter_environment
from launch.starters.interface import Ranks
from launch.starters.python import Python
from records.environment import find_allocator
from tests.launching import DISTRIBUTED, lockstep, require_backend, train
from tests.sparing import in_ci

IN_VAIN = "libjemalloc-of-nobody.so.1"
REMARK = (
    f"LD_PRELOAD has {IN_VAIN}, which cannot be loaded here; install what is missing, or correct or unset LD_PRELOAD"
)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {name: ((f"lib{name}-of-nobody.so.1",), f"package-of-{name}") for name in ("tcmalloc", "jemalloc")}
    monkeypatch.setattr(allocator, "_LIBRARIES", absent)


def _any_library() -> str:
    """The path of a library that is no allocator and loads."""
    return next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libm.so" in line)


def test_that_of_the_c_library_needs_no_library() -> None:
    assert settle_allocator("glibc") == Allocator("glibc", None)


@pytest.mark.usefixtures("nothing_installed")
def test_without_another_one_auto_is_that_of_the_c_library() -> None:
    assert settle_allocator("auto") == Allocator("glibc", None)
    said = describe_allocator("auto")
    assert said == "memory allocator: glibc; install tcmalloc (on Debian libtcmalloc-minimal4) for faster steps"
    assert describe_allocator("glibc") is None


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", ["tcmalloc", "jemalloc"])
def test_one_that_cannot_be_loaded_is_refused(name: str) -> None:
    wanted = f"--allocator {name}: lib{name}-of-nobody.so.1 cannot be loaded here; install it .* package-of-{name}"
    with pytest.raises(UsageError, match=wanted):
        settle_allocator(name)


@pytest.mark.usefixtures("nothing_installed")
def test_one_that_the_user_loads_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libjemalloc.so.1").symlink_to(_any_library())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.1")
    assert settle_allocator("auto") == settle_allocator("jemalloc") == Allocator("jemalloc", None)
    assert describe_allocator("auto") is describe_allocator("jemalloc") is None
    with pytest.raises(UsageError, match=r"^--allocator glibc: LD_PRELOAD has libjemalloc.so.1; unset it, or leave"):
        settle_allocator("glibc")
    monkeypatch.delenv("LD_LIBRARY_PATH")  # then it is not loaded
    assert settle_allocator("auto") == Allocator("glibc", None)


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("libtcmalloc_minimal.so.4", "tcmalloc"),
        ("/usr/lib/libmimalloc.so.2", "mimalloc"),
        ("libmimalloc-secure.so", "mimalloc"),
        ("/opt/hoard/libhoard.so", "hoard"),
        ("libsnmallocshim.so", "snmalloc"),
        ("libtbbmalloc_proxy.so.2", "tbbmalloc"),
        ("libtbbmalloc.so.2", None),  # which takes the place of nothing
        ("libm.so.6", None),
        ("/opt/jemalloc/libm.so.6", None),
        ("/opt/jemalloc.sources/libm.so.6", None),
    ],
)
def test_an_allocator_is_known_by_the_name_of_its_file(library: str, name: str | None) -> None:
    assert find_allocator(library) == name
    mapped = "7f00-7f01 r-xp 00000000 08:01 1    "
    assert find_allocator(f"{mapped}/lib/libc.so.6\n{mapped}/lib/{library}\n7f02-7f03 rw-p 00000000 00:00 0\n") == name


def test_one_that_the_option_does_not_know_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is installed beside it."""
    (tmp_path / "libmimalloc.so.2").symlink_to(_any_library())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", "libmimalloc.so.2")
    kept = settle_allocator("auto")
    assert (kept, kept.option) == (Allocator("mimalloc", None), "auto")
    assert describe_allocator("auto") == "memory allocator: mimalloc, from LD_PRELOAD"
    doctor([])
    assert "memory allocator: mimalloc, from LD_PRELOAD" in capsys.readouterr().out.splitlines()
    for asked in ("tcmalloc", "glibc"):
        with pytest.raises(UsageError, match=rf"^--allocator {asked}: LD_PRELOAD has libmimalloc.so.2; unset it, or"):
            settle_allocator(asked)


@pytest.mark.processes
def test_ranks_have_one_that_the_option_does_not_know(tmp_path: Path) -> None:
    library = tmp_path / "libmimalloc.so.2"
    shutil.copy(_any_library(), library)  # a link would be known by what it leads to
    options = ("--task", "token-tagging", "--max-steps", "2", "--output-dir", tmp_path / "run")
    done = lockstep("single", *options, env={"LD_PRELOAD": str(library)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("memory allocator: mimalloc, from LD_PRELOAD") == 1
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["environment"]["variables"]["LD_PRELOAD"] == str(library)
    assert record["environment"]["allocator"] == record["ranks"][0]["allocator"] == "mimalloc"
    assert record["config"]["allocator"] == "auto"


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("preload", [IN_VAIN, f"libm.so.6:{IN_VAIN}", f"{IN_VAIN} libm-of-nobody.so.6"])
def test_one_that_the_user_loads_in_vain_is_named(
    preload: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LD_PRELOAD", preload)
    assert settle_allocator("auto") == settle_allocator("glibc") == Allocator("glibc", None)
    wanted = f"memory allocator: glibc; {REMARK}"
    assert describe_allocator("auto") == describe_allocator("glibc") == wanted
    doctor([])
    assert wanted in capsys.readouterr().out.splitlines()


@pytest.mark.processes
def test_a_run_names_what_the_user_loads_in_vain(tmp_path: Path) -> None:
    options = ("--task", "token-tagging", "--max-steps", "2", "--output-dir", tmp_path / "run")
    done = lockstep("single", *options, env={"LD_PRELOAD": IN_VAIN})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count(f"memory allocator: {settle_allocator('auto').name}; {REMARK}") == 1


def test_it_comes_before_what_the_user_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = Ranks(1, (), "cpu", 1, None, 15.0, tmp_path, preload="libown.so.1")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert starter_environment(Python(), ranks)["LD_PRELOAD"] == "libown.so.1"
    monkeypatch.setenv("LD_PRELOAD", "libfirst.so libsecond.so")
    assert starter_environment(Python(), ranks)["LD_PRELOAD"] == "libown.so.1 libfirst.so libsecond.so"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("backend", "asked"),
    in_ci(
        [("ddp", "auto"), ("horovod", "auto"), ("ddp", "glibc")],
        [*((name, "auto") for name in DISTRIBUTED), ("ddp", "glibc")],
    ),
)
def test_ranks_have_it(backend: str, asked: str, tmp_path: Path) -> None:
    require_backend(backend)
    options = ("--task", "token-tagging", "--num-processes", "2", "--max-steps", "2", "--allocator", asked)
    record = train(backend, tmp_path / "run", *options)
    assert record["config"]["allocator"] == record["environment"]["allocator"] == settle_allocator(asked).name
    assert {rank["allocator"] for rank in record["ranks"]} == {settle_allocator(asked).name}


@pytest.mark.processes
def test_ranks_that_measure_collectives_have_that_of_a_training(tmp_path: Path) -> None:
    options = ("--backends", "ddp", "--num-processes", "2", "--threads-per-rank", "2", "--operations", "all_reduce")
    done = lockstep("allreduce", *options, "--sizes", "1KiB", "--seconds-per-point", "0", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    environment = read_collectives(tmp_path / "out").environment
    assert environment.allocator == settle_allocator("auto").name
    assert environment.variables["OMP_NUM_THREADS"] == "2"  # of the ranks, not of the command
