"""The libraries are imported once: in the process that ranks are copies of, and in the one that forks their workers."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from launch.starters.interface import PROJECT_DIRECTORY
from tests.launching import lockstep

pytestmark = [pytest.mark.processes, pytest.mark.slow]

_TASK = """
from tasks.token_tagging import TokenTagging

class OwnTask(TokenTagging):
    imported_modules = ("own_library",)
"""
# Each process that imports it leaves its number, and whether torch's compiler had been imported, as for an optimizer.
_LIBRARY = """
import os, sys
with open({path!r}, "a") as file:
    file.write(f"{{os.getpid()}}:{{'torch._dynamo' in sys.modules}}\\n")
"""
_TASK_OF_WORKERS = """
import os
from pathlib import Path
from tasks.token_tagging import TokenTagging

class WorkersTask(TokenTagging):
    def collate(self, split, sample_ids):
        parent = Path("/proc", str(os.getppid()))
        is_server = "multiprocessing.forkserver" in (parent / "cmdline").read_text()
        with open({path!r}, "a") as file:
            file.write(f"{{parent.name}}:{{is_server and 'libtorch_cpu' in (parent / 'maps').read_text()}}\\n")
        return super().collate(split, sample_ids)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a task and a library of somebody's own."""
    (tmp_path / "own_task.py").write_text(_TASK)
    (tmp_path / "own_library.py").write_text(_LIBRARY.format(path=str(tmp_path / "imports")))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def _train(own: Path, start_method: str) -> tuple[int, str, str]:
    """Returns the exit code, what was printed, and the log of the starter."""
    options = ("--task", "own_task:OwnTask", "--num-processes", "2", "--max-steps", "2", "--no-evaluate")
    path = {"PYTHONPATH": f"{PROJECT_DIRECTORY}:{own}"}
    directory = own / start_method
    done = lockstep("ddp", *options, "--start-method", start_method, "--output-dir", directory, env=path)
    return done.returncode, done.stdout + done.stderr, (directory / "logs" / "starter.log").read_text()


def _num_imports(own: Path) -> int:
    imports = (own / "imports").read_text().split()
    assert all(line.endswith(":True") for line in imports)
    return len(imports)


@pytest.mark.parametrize(("start_method", "num_imports"), [("fork", 1), ("spawn", 2), ("torchrun", 2)])
def test_who_imports(own: Path, start_method: str, num_imports: int) -> None:
    code, printed, _ = _train(own, start_method)
    assert code == 0, printed
    assert _num_imports(own) == num_imports


def test_workers_of_all_epochs_are_forks_of_a_process_that_has_torch(own: Path) -> None:
    (own / "workers_task.py").write_text(_TASK_OF_WORKERS.format(path=str(own / "parents")))
    options = ("--num-train-samples", "64", "--num-train-epochs", "3", "--dataloader-num-workers", "2", "--no-evaluate")
    path = {"PYTHONPATH": f"{PROJECT_DIRECTORY}:{own}"}
    options = ("--task", "workers_task:WorkersTask", *options, "--batching", "padded", "--output-dir", str(own / "run"))
    done = lockstep("single", *options, env=path)
    assert done.returncode == 0, done.stderr
    (parent,) = set((own / "parents").read_text().split())
    assert parent.endswith(":True")


def test_the_ranks_of_the_contract_share_the_compiler() -> None:
    program = "import sys; from contract.worker import load_libraries as load; print({0}); load('.'); print({0})"
    command = [sys.executable, "-c", program.format("'torch._dynamo' in sys.modules")]
    done = subprocess.run(command, cwd=PROJECT_DIRECTORY, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_every_rank_program_can_import_first(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _train(own, "torchrun")[0] == 0
    for program, arguments in (("training.rank", ()), ("compare.race.rank", ("-",))):
        before = _num_imports(own)
        for name in ("own_task", "own_library"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(program).load_libraries(*arguments, str(own / "torchrun"), "RANK")
        assert _num_imports(own) == before + 1, program


@pytest.mark.parametrize(
    ("line", "code", "printed", "logged"),
    [
        ("raise RuntimeError('no licence')", 1, "RuntimeError: no licence", "an import has failed (RuntimeError"),
        ("raise SystemExit(5)", 1, "SystemExit: 5", "an import has failed (SystemExit"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            0,
            "",
            "a thread",
        ),
    ],
)
def test_ranks_are_no_copies_of_a_process_that_cannot_be_copied(
    own: Path, line: str, code: int, printed: str, logged: str
) -> None:
    with (own / "own_library.py").open("a") as file:
        file.write(f"{line}\n")
    ended, output, log = _train(own, "fork")
    assert ended == code, output
    assert printed in output
    assert "the ranks are spawned instead of forked" in log
    assert logged in log
