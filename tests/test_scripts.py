"""The scripts that users call, before any Python of ours runs: what they set up, and what they make of signals.

An interpreter of a few lines stands in for Python: it makes environments and installs packages without doing so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.starters.interface import PROJECT_DIRECTORY
from tests.help_texts import DIRECTORY as help_directory
from tests.help_texts import help_texts
from tests.launching import ending_processes_with, processes_with, wait_until

RUN_SH = PROJECT_DIRECTORY / "launch" / "run.sh"

# In an environment it is bin/python; what it was asked to install is in installed.txt beside bin/.
STUB = """#!/usr/bin/env bash
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip install "*)
    here=$(dirname "$(dirname "$0")")
    echo "$@" >>"$here/installed.txt"
    if [[ -n ${SLOW:-} ]]; then touch "$SLOW"; sleep 600; fi
    printf '#!/bin/sh\\necho "lockstep: $*; cache $LOCKSTEP_CACHE"\\n' >"$here/bin/lockstep"
    chmod +x "$here/bin/lockstep"
    ;;
esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with the stub as `python3`."""
    stub = tmp_path / "python3"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return tmp_path


def environment(place: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "VIRTUAL_ENV"))}
    return {**kept, "PYTHON": str(place / "python3"), "LOCKSTEP_VENV": str(place / "venv"), **variables}


def run(place: Path, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *map(str, command)],
        cwd=place,
        env=environment(place, **variables),
        capture_output=True,
        text=True,
        timeout=60,
    )


def installed(place: Path) -> str:
    log = place / "venv" / "installed.txt"
    return log.read_text() if log.exists() else ""


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_the_overview_needs_no_set_up(place: Path, arguments: list[str]) -> None:
    done = run(place, RUN_SH, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "launch/run.sh compare" in done.stdout
    assert "LOCKSTEP_CACHE" in done.stdout
    assert not (place / "venv").exists()


def test_no_arguments_are_an_error_that_shows_the_overview(place: Path) -> None:
    done = run(place, RUN_SH)
    assert done.returncode == 2
    assert "launch/run.sh compare" in done.stdout


def test_a_bash_that_does_not_tell_the_time_is_enough(place: Path) -> None:
    """As before version 5.0: here without the variable that a later one has."""
    old, begin = "unset EPOCHREALTIME; set -u", time.time()
    done = run(place, "-c", f'{old}; source "{RUN_SH}" --help')
    assert (done.returncode, done.stderr) == (0, "")
    assert "launch/run.sh compare" in done.stdout
    done = run(place, "-c", f'{old}; source "{RUN_SH.parent}/setup.sh"; note_start; echo "$LOCKSTEP_STARTED_AT"')
    assert begin - 1 <= float(done.stdout) <= time.time() + 1, done.stderr


@pytest.mark.parametrize(
    ("command", "file"),
    [
        *(("compare", "compare"), ("allreduce", "allreduce"), ("report", "report"), ("contract horovod", "contract")),
        *(("single", "BACKEND"), ("apex --docker", "apex"), ("doctor", "doctor"), ("mine:Adapter", "BACKEND")),
        *(("ddp --engine slurm", "engine-slurm"), ("ddp --engine=mpi --hosts a,b", "engine-mpi")),
        *(("compare --engine netns", "compare"), ("allreduce --engine=slurm", "allreduce")),
        *(
            ("forecast", "forecast"),
            ("forecast profile", "forecast-profile"),
            ("forecast profile ddp", "forecast-profile"),
        ),
    ],
)
def test_help_needs_no_set_up(place: Path, command: str, file: str) -> None:
    done = run(place, RUN_SH, *command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    text = help_texts()[f"{file}.txt"]
    backend = command.split()[0]
    if file == "BACKEND":
        text = text.replace("BACKEND", backend, 1)
    elif file.startswith("engine-"):
        text = text.replace("BACKEND", backend)
    assert done.stdout == text
    assert not (place / "venv").exists()


def test_help_of_a_command_needs_no_package_that_only_the_command_needs(place: Path) -> None:
    assert run(place, RUN_SH, "single").returncode == 0
    done = run(place, RUN_SH, "forecast", "--help")
    assert done.stdout == help_texts()["forecast.txt"]
    assert run(place, RUN_SH, "single", "--help").stdout.startswith("lockstep: single --help;")


@pytest.mark.parametrize(
    ("command", "extras"),
    [
        ("forecast profile ddp", "ddp,compare"),
        ("forecast --profile runs/a --network 1gbit", "single,compare"),
        ("compare --backends ddp,accelerate --output-dir horovod-study", "compare,ddp,accelerate"),
        ("compare --backends=ddp --entrant tuned=fsdp2:--precision=bf16", "compare,ddp,fsdp2"),
        ("allreduce --backends ddp", "compare,ddp"),
        ("ddp --tracker none", "ddp"),
        ("ddp --tracker tensorboard", "ddp,tracking"),
    ],
)
def test_what_a_command_needs_is_set_up_and_nothing_else(place: Path, command: str, extras: str) -> None:
    done = run(place, RUN_SH, *command.split())
    assert done.returncode == 0, done.stderr
    assert installed(place).strip().endswith(f"[{extras}]")


def lacking(place: Path, what: str) -> dict[str, str]:
    """Variables of a machine that has all that this one has, but not one of the things that a build needs."""
    if what == "Python.h":
        (place / "python3").write_text(STUB.replace('case "$*" in', 'case "$*" in\n  *Python.h*) exit 1 ;;', 1))
    programs = place / "programs"
    programs.mkdir()
    for directory in filter(Path.is_dir, map(Path, os.environ["PATH"].split(":"))):
        for program in directory.iterdir():
            if program.name != what and not (programs / program.name).is_symlink():
                (programs / program.name).symlink_to(program)
    return {"PATH": str(programs), "LOCKSTEP_CACHE": str(place / "cache")}


@pytest.mark.parametrize("what", ["g++", "cmake", "make", "Python.h"])
def test_what_a_build_lacks_is_named_before_anything_is_made(place: Path, what: str) -> None:
    done = run(place, RUN_SH, "horovod", **lacking(place, what))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("lockstep: building Horovod for ")
    needed, _, advice = line.partition(" needs ")[2].partition("; ")
    assert what in needed.split(", ")
    assert advice == "install what is missing (Debian: apt-get install g++ cmake make python3-dev)"
    assert not (place / "venv").exists()


@pytest.mark.parametrize("what", ["g++", "cmake", "make", "Python.h"])
def test_a_race_leaves_out_what_cannot_be_built(place: Path, what: str) -> None:
    done = run(place, RUN_SH, "compare", **lacking(place, what))
    assert done.returncode == 0, done.stderr
    extras = installed(place).strip().rpartition("[")[2].rstrip("]").split(",")
    assert {"compare", "ddp", "accelerate"} <= {*extras}
    assert "horovod" not in extras
    assert "Horovod" not in done.stderr


def test_a_package_that_is_built_already_needs_no_tools(place: Path) -> None:
    command = (PROJECT_DIRECTORY / "backends" / "horovod_build.sh", "--check", sys.executable)
    variables = lacking(place, "make")
    assert run(place, *command, **variables).returncode == 2
    for torch, code in (("2.12.0", 2), ("2.13.0+cpu", 0)):
        for transports in ("gloo", "gloo-mpi"):  # as this machine has MPI, or not
            wheels = place / "cache" / "wheels" / f"horovod-0.28.1-cp3{sys.version_info[1]}-torch{torch}-{transports}"
            wheels.mkdir(parents=True)
            (wheels / "horovod.whl").touch()
        done = run(place, *command, **variables)
        assert done.returncode == code, done.stderr
        assert (done.stderr == "") == (code == 0)


def test_an_environment_whose_python_has_changed_is_set_up_again(place: Path) -> None:
    link = place / "venv" / "bin" / "python"
    assert run(place, RUN_SH, "single").returncode == 0
    (place / "python3.13").write_text(STUB)
    (place / "python3.13").chmod(0o755)
    link.unlink()
    link.symlink_to(place / "python3.13")  # as by an upgrade of the system
    assert run(place, RUN_SH, "single").stderr.startswith("lockstep: setting up")
    assert run(place, RUN_SH, "single").stderr == ""
    (place / "python3.13").unlink()
    assert run(place, RUN_SH, "single").stderr.startswith("lockstep: setting up")
    assert not link.is_symlink()


@pytest.mark.parametrize("tool", ["mpicxx", "nvcc"])
def test_a_compiler_that_comes_later_only_concerns_what_is_built(place: Path, tool: str) -> None:
    """As by `module load`: where there is no network, the packages of all others could not be installed again."""
    assert run(place, RUN_SH, "ddp").returncode == 0
    (place / "module").mkdir()
    (place / "module" / tool).write_text("#!/bin/sh\nexit 1\n")
    (place / "module" / tool).chmod(0o755)
    found = {"PATH": f"{place / 'module'}:{os.environ['PATH']}"}
    assert run(place, RUN_SH, "ddp", **found).stderr == ""
    script = f'source "{RUN_SH.parent}/setup.sh"; find_environment; setup_key'
    for extra, differs in {"ddp": False, "horovod": True}.items():
        before, after = (run(place, "-c", f"{script} {extra}", **path).stdout for path in ({}, found))
        assert (before != after) == differs
        assert before


def test_the_files_of_help_are_what_the_commands_print() -> None:
    files = {path.name: path.read_text() for path in help_directory.iterdir()}
    assert files == help_texts(), "python -m tests.help_texts writes them"
    assert not [name for name, text in files.items() if "%%" in text]
    assert files["compare.txt"].count("(default: on)") >= 5
    assert "--hosts HOSTS" in files["engine-mpi.txt"]


@pytest.mark.parametrize("script", ["launch/run.sh", "tests/run.sh", "tests/gpu/run.sh"])
def test_a_link_to_a_script_finds_its_files(place: Path, script: str) -> None:
    (place / "first").symlink_to(PROJECT_DIRECTORY / script)
    (place / "link").symlink_to("first")
    if script == "launch/run.sh":
        done = run(place, "link", "single", "--seed", "1")
        assert done.stdout.startswith("lockstep: single --seed 1;"), done.stderr
    else:
        done = run(place, "link", PYTHON="/nowhere/python")
        assert done.stderr.startswith("lockstep: PYTHON=/nowhere/python is"), done.stderr


def test_a_directory_search_path_of_the_user_changes_nothing(place: Path) -> None:
    done = run(place, RUN_SH, "single", CDPATH=f"{place}:/")
    assert done.stdout.startswith("lockstep: single;"), done.stderr


@pytest.mark.parametrize(
    ("value", "expected"),
    [("venv", "venv"), ("./a b/venv", "a b/venv"), ("~/venv", "home/venv")],
)
def test_the_environment_may_be_named_in_any_way(place: Path, value: str, expected: str) -> None:
    done = run(place, RUN_SH, "single", LOCKSTEP_VENV=value, HOME=str(place / "home"))
    assert done.stdout.startswith("lockstep: single;"), done.stderr
    assert (place / expected / "bin" / "lockstep").exists()
    assert not (place / "~").exists()


@pytest.mark.parametrize("value", ["/dev/null", "python3", "python3/venv", "/proc/venv"])
def test_an_environment_that_cannot_be_made_is_refused(place: Path, value: str) -> None:
    done = run(place, RUN_SH, "single", LOCKSTEP_VENV=value)
    assert done.returncode == 2
    path = value if value.startswith("/") else f"{place}/{value}"
    assert done.stderr == (
        f"lockstep: {path}: lacks single and cannot be written; leave out what needs it, or set LOCKSTEP_VENV to "
        "another directory\n"
    )


@pytest.mark.parametrize("temporary", ["/nowhere", "", "/dev/null"])
def test_set_up_needs_no_temporary_directory(place: Path, temporary: str) -> None:
    done = run(place, RUN_SH, "single", TMPDIR=temporary)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LOCKSTEP_CACHE": "wheels"}, "{place}/wheels"),
        ({"LOCKSTEP_CACHE": "~/wheels"}, "{place}/wheels"),
        ({"LOCKSTEP_CACHE": "", "XDG_CACHE_HOME": ""}, "{place}/.cache/lockstep"),
        ({"XDG_CACHE_HOME": "relative"}, "{place}/.cache/lockstep"),
        ({"XDG_CACHE_HOME": "/shared"}, "/shared/lockstep"),
    ],
)
def test_scripts_and_python_agree_on_the_cache(
    place: Path, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.cache import cache_directory

    told = {"HOME": str(place), **variables}
    script = f'source "{RUN_SH.parent}/setup.sh"; cache_directory'
    done = run(place, "-c", script, **told)
    assert done.stdout.strip() == expected.format(place=place), done.stderr
    for name in ("LOCKSTEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(place)
    assert str(cache_directory()) == expected.format(place=place)


def _interrupted_set_up(place: Path, number: signal.Signals) -> tuple[int, str]:
    slow = place / "slow"
    process = subprocess.Popen(
        # A test session may have been started to ignore signals, in the background or under nohup(1).
        ["env", "--default-signal=INT,TERM,HUP", "bash", RUN_SH, "single"],
        cwd=place,
        env=environment(place, SLOW=str(slow)),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(slow.exists, "a call of pip", job=process)
    os.killpg(process.pid, number)  # as a terminal does for Ctrl-C
    _, errors = process.communicate(timeout=180)
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_set_up_leaves_no_process_and_goes_on(place: Path, number: signal.Signals) -> None:
    with ending_processes_with(place):
        code, errors = _interrupted_set_up(place, number)
        assert not processes_with(place)
    assert code == 128 + number
    assert errors.splitlines()[-1] == "lockstep: the set-up was interrupted; the same command continues it"
    assert len(errors.splitlines()) == 2  # the other one is its announcement
    done = run(place, RUN_SH, "single")  # does not wait for a lock that somebody still holds
    assert done.stdout.startswith("lockstep: single;"), done.stderr


def test_an_environment_without_pip_is_completed(place: Path) -> None:
    (place / "venv" / "bin").mkdir(parents=True)
    python = place / "venv" / "bin" / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *"import pip"*) exit 1 ;; esac\n')
    python.chmod(0o755)
    # This one cannot complete itself; it is what an interrupted `python -m venv` leaves.
    done = run(place, RUN_SH, "single")
    assert done.stdout.startswith("lockstep: single;"), done.stderr
    assert python.read_text() == STUB


def test_the_environment_of_another_set_up_is_waited_for(place: Path) -> None:
    (place / "venv" / ".lockstep").mkdir(parents=True)
    holder = subprocess.Popen(
        ["flock", place / "venv" / ".lockstep" / "lock", "sh", "-c", "echo held; sleep 2"], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    done = run(place, RUN_SH, "single")
    holder.communicate(timeout=180)
    assert f"waiting for another set-up of {place / 'venv'}" in done.stderr
    assert done.returncode == 0


# It has every image, and shows what it is to run.
DOCKER = """#!/bin/sh
case "$*" in
  *Arch*) echo amd64 ;;
  run*) echo "$@" ;;
esac
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs containers for other users")
def test_root_keeps_its_own_cache_when_results_are_another_users(place: Path) -> None:
    (place / "docker").write_text(DOCKER)
    (place / "docker").chmod(0o755)
    for name in ("images", "theirs"):
        (place / name).mkdir()
    os.chown(place / "theirs", 1234, 1235)
    options = ("ddp", "--docker", "--data-dir", "images", "--output-dir", "theirs/run")
    path = f"{place}:{os.environ['PATH']}"
    done = run(place, RUN_SH, *options, PATH=path, LOCKSTEP_CACHE=str(place / "cache"))
    assert done.returncode == 0, done.stderr
    assert f"source={place}/cache/1234-1235,target=" in done.stdout
    assert f"source={place}/images,target={place}/images,readonly" in done.stdout
    assert f"--data-dir {place}/images" in done.stdout
    assert [(place / name).stat().st_uid for name in ("cache", "cache/1234-1235")] == [0, 1234]
