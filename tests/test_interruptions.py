"""How commands begin and end: signals before anything has begun, streams that are closed or full, plain output."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.cli import main
from launch.display import RunDisplay, console
from launch.options import read_option_file
from launch.signals import Interrupted, signals_raised
from launch.starters.interface import PROJECT_DIRECTORY
from records.news import Evaluated, EvaluationBegan, StepEnded
from records.progress import ProgressLog
from records.record import EvaluationRecord
from tests.launching import run_config

pytestmark = pytest.mark.slow

LAUNCH = (sys.executable, "-P", "-m", "launch") if sys.version_info >= (3, 11) else (sys.executable, "-m", "launch")
COMMANDS = ["ddp --task token-tagging", "doctor", "contract single", "compare --dry-run", "report x", "allreduce"]


def launch(command: str, **options: object) -> subprocess.Popen[str]:
    # As launch/run.sh starts it, also where the tests themselves were started with signals ignored, as by `&`.
    patiently = ["env", "--default-signal=INT,TERM,HUP", "--block-signal=INT"]
    return subprocess.Popen([*patiently, *LAUNCH, *command.split()], stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_early_signal_ends_a_command_without_a_word(command: str, tmp_path: Path) -> None:
    """The modules that take long to load are replaced by one that says that it is being loaded, and takes longer."""
    (tmp_path / "pydantic.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'loading')!r}).touch()\ntime.sleep(60)\n"
    )
    path = f"{tmp_path}:{PROJECT_DIRECTORY}"
    for number, is_loading in ((signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, True)):
        process = launch(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
        deadline = time.monotonic() + 60
        while is_loading and not (tmp_path / "loading").exists():
            assert time.monotonic() < deadline, "nothing was loaded"
            time.sleep(0.02)
        if not is_loading:
            time.sleep(0.05)  # env(1) has become Python, which has hardly begun
        process.send_signal(number)
        _, errors = process.communicate(timeout=180)
        assert (process.returncode, errors) == (-number, "")
        (tmp_path / "loading").unlink(missing_ok=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("disguise", [None, ImportError])
def test_a_signal_during_preparation_is_told_in_a_line(
    number: signal.Signals,
    disguise: type[Exception] | None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def prepare(*_: object) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        except BaseException as error:
            if disguise is None:
                raise
            raise disguise("a library could not be loaded") from error

    monkeypatch.setattr("launch.train_command.find_backend", prepare)
    monkeypatch.setattr(sys, "argv", ["lockstep", "ddp"])
    before = signal.signal(number, signal.default_int_handler)  # nohup, which may run these tests, has SIGHUP ignored
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number
    assert capfd.readouterr().err == f"lockstep: interrupted by {number.name}\n"


def test_a_signal_that_a_library_swallows_is_answered_the_second_time() -> None:
    with signals_raised(repeatedly=True):
        for _ in range(2):
            with pytest.raises(Interrupted):
                os.kill(os.getpid(), signal.SIGTERM)


def test_no_handler_of_errors_takes_an_interruption() -> None:
    assert not issubclass(Interrupted, Exception)


def test_the_end_of_a_session_is_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_raised():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


# Redirections -> what stderr must hold, and the exit code.
STREAMS = {
    "--help >/dev/full": ("lockstep: the output cannot be written (No space left on device)\n", 1),
    "doctor --help >/dev/full": ("lockstep: the output cannot be written (No space left on device)\n", 1),
    "doctor >/dev/full": ("lockstep: the output cannot be written (No space left on device)\n", 0),
    "doctor >&-": ("", 0),
    "doctor <&- >&-": ("", 0),
    "dpd 2>&-": ("", 2),
    "dpd 2>/dev/full": ("", 2),
    "--help | true": ("", 0),
}


@pytest.mark.parametrize("command", STREAMS)
def test_streams_that_are_lost(command: str) -> None:
    errors, code = STREAMS[command]
    script = f"{' '.join(LAUNCH)} {command}"
    done = subprocess.run(
        ["sh", "-c", script], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, timeout=180
    )
    assert (done.stderr, done.returncode) == (errors, code)


def test_a_refusal_of_the_system_is_no_matter_of_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where a user may have no more processes, no rank can be started: root has no such limit."""

    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    run = tmp_path / "run"
    monkeypatch.setattr("launch.supervisor.subprocess.Popen", refuse)
    monkeypatch.setattr(
        sys, "argv", ["lockstep", "single", "--task", "token-tagging", "--max-steps", "1", f"--output-dir={run}"]
    )
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capfd.readouterr().err == "lockstep: [Errno 11] Resource temporarily unavailable\n"
    record = json.loads((run / "record.json").read_text())
    assert (record["status"], record["error"]) == ("failed", "[Errno 11] Resource temporarily unavailable")


def test_a_removed_working_directory_is_named(tmp_path: Path) -> None:
    script = f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir ../gone; {' '.join(LAUNCH)} doctor"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=180)
    assert done.returncode == 2
    assert done.stderr.startswith("lockstep: the working directory no longer exists")
    assert len(done.stderr.splitlines()) == 1


def test_every_command_has_help(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for command in COMMANDS:
        for option in ("--help", "-h"):
            monkeypatch.setattr(sys, "argv", ["lockstep", command.split()[0], option])
            with pytest.raises(SystemExit) as ended:
                main()
            shown = capfd.readouterr()
            assert (ended.value.code, shown.err) == (0, "")
            assert shown.out.startswith(f"usage: launch/run.sh {command.split()[0]}")


def test_help_needs_no_extra(tmp_path: Path) -> None:
    """Without what only some extras bring."""
    hidden = "('scipy', 'psutil', 'jinja2', 'accelerate', 'horovod')"
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\nfind = PathFinder.find_spec\n"
        f"PathFinder.find_spec = classmethod(lambda c, name, *r: None if name in {hidden} else find(name, *r))\n"
    )
    for command in ("compare", "report", "allreduce", "contract", "horovod"):
        done = subprocess.run(
            [*LAUNCH, command, "--help"],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{PROJECT_DIRECTORY}"},
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("variables", [{}, {"COLUMNS": "20"}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_piped_output_has_a_line_for_each_row(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.table import Table

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(overflow="fold")
    path = f"/{'x' * 500} with blanks"
    table.add_row(path)
    table.add_row("short")
    console().print(table)
    assert capsys.readouterr().out == f"{path}\nshort\n"


def test_numbers_of_a_file_mean_what_they_mean_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(
        "a: 010\nb: 1:30\nc: 0x10\nd: 12\ne: -3\nf: 0.5\ng: 1_0\nh: +.5\ni: 2.5e-3\nj: yes\nk: ~/x\n"
    )
    options = read_option_file(tmp_path / "options.yaml")
    assert options == {
        **{"a": "010", "b": "1:30", "c": "0x10", "d": 12, "e": -3, "f": 0.5, "g": "1_0", "h": 0.5, "i": 0.0025},
        **{"j": True, "k": str(Path.home() / "x")},
    }


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_display_says_when_it_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    terminal = screen.getvalue
    log = ProgressLog(tmp_path, rank=0)
    with RunDisplay(run_config("single", 1, tmp_path, micro_batch_size=32), console()) as display:
        log.write(StepEnded(step=5, num_steps=10, loss=1.0))
        display.refresh()
        assert "training" in terminal()
        assert "evaluating" not in terminal()
        log.write(EvaluationBegan(step=5, num_steps=10))
        display.refresh()
        assert "evaluating" in terminal()
        log.write(Evaluated(evaluation=EvaluationRecord(step=5, epoch=0, seconds=1.0, metrics={"accuracy": 0.5})))
        display.refresh()
        assert terminal().rindex("training") > terminal().rindex("evaluating")
