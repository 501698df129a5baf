"""Who takes part in a race beside the backends that the user names, without racing really."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from compare.race.entrants import make_plan, read_run_options
from compare.race.options import RaceOptions
from compare.race.plan import Entrant
from compare.results import Role
from records.environment import num_cpus
from tests.forked.client import interpreter
from tests.launching import lockstep, require_backend


@pytest.mark.parametrize(
    ("num_gpus", "device", "backends", "expected"),
    [
        (0, "auto", ["ddp"], {"single (all cores)": "cpu"}),
        (0, "auto", ["single", "ddp"], {"single (all cores)": "cpu"}),
        (2, "cpu", ["single", "ddp"], {"single (all cores)": "cpu"}),
        (2, "auto", ["ddp"], {"single (one GPU)": "cuda"}),
        (2, "cuda", ["ddp"], {"single (one GPU)": "cuda"}),
        (2, "auto", ["single", "ddp"], {}),  # it has one GPU in any case
    ],
)
def test_one_process_takes_part_with_what_the_ranks_compute_on(
    num_gpus: int, device: str, backends: list[str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("compare.race.entrants", "launch.options", "launch.resolve"):
        monkeypatch.setattr(f"{module}.count_gpus", lambda: num_gpus)
    options = RaceOptions(backends=backends, num_processes=[1, 2])
    _, configs = make_plan(options, read_run_options(["--task=token-tagging", f"--device={device}"], None))
    instead = {who.name: config for who, config in configs.items() if who.role == "alternative"}
    assert {name: config.device for name, config in instead.items()} == expected
    assert all(config.threads_per_rank == num_cpus() for config in instead.values() if config.device == "cpu")


def test_a_peer_is_refused_where_the_backend_of_its_name_can_compute(tmp_path: Path) -> None:
    require_backend("fabric")
    options = ["--peers", "fabric", "--precision", "fp16", "--entrant", "fabric:--bucket-cap-mb 1"]
    done = lockstep("compare", "--backends", "ddp", "--num-processes", "2", *options, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "fabric cannot compute in fp16 on cpu" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("role", "complaint"),
    [
        ("backend", "--start-method mpirun: fabric is started by fork, torchrun or spawn"),
        ("bare", "--start-method mpirun: fabric is started by fork, torchrun or spawn"),
        ("peer", "unknown option --bucket-cap-mb"),
    ],
)
def test_a_backend_is_not_taken_for_the_peer_of_its_name(role: Role, complaint: str, tmp_path: Path) -> None:
    require_backend("fabric")
    who = Entrant(backend="fabric", num_processes=2, precision="fp32", accumulation=1, global_batch_size=32, role=role)
    command = [interpreter(), "-m", "compare.race.entrant", who.rank_program, "-", who.backend, "--task=token-tagging"]
    command += ["--bucket-cap-mb=1", "--start-method=mpirun"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert complaint in done.stderr
    assert list(tmp_path.iterdir()) == []
