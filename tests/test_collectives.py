"""The benchmark of collectives: small real runs of it, good and bad."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import torch
import torch.distributed as dist

from backends.capabilities import BackendSettings
from backends.collectives import Prepare
from backends.ddp import DDPBackend
from backends.interface import Backend, BackendOptions
from backends.torch_group import all_reduce_in_group
from compare.collectives.measurement import OPERATIONS, CollectivesFile, bus_factor, read_collectives
from contract.patience import stretched
from tests.launching import LOCKSTEP, lockstep, needs_namespaces, require_backend, require_start_method

SIZES = (2**10, 2**14, 2**18)
TINY = ("--num-processes", "2", "--sizes", "1KB,16KB,256KB", "--seconds-per-point", "0.01", "--timeout", "30")


def _run(output: Path, *arguments: str) -> tuple[CollectivesFile, str]:
    done = lockstep("allreduce", *TINY, *arguments, "--output", output)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return read_collectives(output), done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[CollectivesFile, str]:
    require_backend("horovod")
    return _run(
        tmp_path_factory.mktemp("collectives") / "out.json",
        "--backends",
        "ddp,horovod",
        "--seconds-per-point",
        "0",
        "--starts",
        "2",
    )


def test_each_library_is_measured_on_its_own_path(measured: tuple[CollectivesFile, str]) -> None:
    content, _ = measured
    found = [(series.backend, series.operation) for series in content.series]
    of_horovod = [operation for operation in OPERATIONS if operation != "gather"]
    assert found == [*(("ddp", one) for one in OPERATIONS), *(("horovod", one) for one in of_horovod)]
    for series in content.series:
        assert (series.transport, series.device, series.num_processes) == ("gloo", "cpu", 2)
        assert [point.bytes for point in series.points] == list(SIZES)
        for point in series.points:
            assert len(point.seconds) == 2 * 5  # starts, and the fewest repetitions of each
            assert min(point.seconds) > 0
            assert point.busbw == pytest.approx(point.algbw * bus_factor(series.operation, 2))
    assert content.command.startswith("launch/run.sh allreduce --num-processes 2")
    assert "torch" in content.environment.packages


def test_the_terminal_shows_every_point(measured: tuple[CollectivesFile, str]) -> None:
    content, text = measured
    assert "horovod has no gather: left out" in text
    for operation in OPERATIONS:
        table = text.partition(f"\n{operation}, 2 ranks")[2].partition("ranks (")[0]
        rows = [line for line in table.splitlines() if re.match(r" *\d+ KiB ", line)]
        num_backends = sum(series.operation == operation for series in content.series)
        assert [len(re.findall(r" [mu]?s ", f"{row} ")) for row in rows] == [num_backends] * len(SIZES)
    assert text.count("(gloo on cpu): ") == len(content.series)
    assert len(max(text.splitlines(), key=len)) < 250


@pytest.mark.slow
def test_more_ranks_and_other_backends(tmp_path: Path) -> None:
    require_backend("accelerate")
    more = ("--num-processes", "2,3", "--backends", "accelerate,tests.by_hand:ByHandBackend", "--sizes", "1KB,12")
    content, _ = _run(tmp_path / "out.json", *more, "--operations", "gather,all_reduce,gather")
    assert [(one.num_processes, one.backend, one.operation) for one in content.series] == [
        (num_processes, backend, operation)
        for num_processes in (2, 3)
        for backend in ("accelerate", "tests.by_hand:ByHandBackend")
        for operation in ("gather", "all_reduce")
    ]
    sizes = [[point.bytes for point in series.points] for series in content.series]
    assert sizes == [[8, 1024], [12, 1024], [8, 1024], [12, 1024], [12, 1020], [12, 1024], [12, 1020], [12, 1024]]
    assert all(series.fit is None for series in content.series)


@pytest.mark.slow
def test_horovod_over_mpi(tmp_path: Path) -> None:
    require_backend("horovod")
    require_start_method("mpirun")
    content, _ = _run(tmp_path / "out.json", "--backends", "horovod", "--start-method", "mpirun")
    assert {series.transport for series in content.series} == {"mpi"}


class BareBackend(DDPBackend):
    """Communicates on its own, through no library that the benchmark knows."""

    name = "bare"

    def __init__(self, options: BackendOptions) -> None:
        Backend.__init__(self, options)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cpu")
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        timeout = timedelta(seconds=options.timeout_seconds)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("bare", store), self.rank, self.world_size, timeout)

    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        return model, optimizer

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.upper())
        reduced = tensor.clone()
        self._group.allreduce([reduced], options).wait()
        return reduced

    def barrier(self) -> None:
        self._group.barrier().wait()

    def effective_settings(self) -> dict[str, str]:
        return {}

    def shutdown(self) -> None:
        self.barrier()


@pytest.mark.slow
def test_an_adapter_of_ones_own_library_is_measured_through_the_adapter(tmp_path: Path) -> None:
    content, text = _run(tmp_path / "out.json", "--backends", "tests.test_collectives:BareBackend")
    (series,) = content.series
    assert (series.operation, series.transport) == ("all_reduce", "unknown")
    for operation in OPERATIONS[1:]:
        assert f"BareBackend has no {operation}: left out" in text
    done = lockstep(
        *("allreduce", *TINY, "--backends", "tests.test_collectives:BareBackend", "--operations", "gather,broadcast"),
        *("--output", tmp_path / "none.json"),
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "lockstep: --operations gather,broadcast: none of the chosen backends implements these"
    )
    assert not (tmp_path / "none.json").exists()


class ChoosySettings(BackendSettings):
    """One option that changes collectives, and one that does not."""

    of_collectives: ClassVar[frozenset[str]] = frozenset({"chosen"})
    chosen: int = 1
    other: int = 1


class ChoosyBackend(DDPBackend):
    """Communicates only if it is told to."""

    name = "choosy"
    Settings = ChoosySettings

    def collectives(self) -> Mapping[str, Prepare]:
        assert isinstance(self.options.settings, ChoosySettings)
        return super().collectives() if self.options.settings.chosen == 2 else {}


@pytest.mark.slow
def test_a_backend_that_is_named_alone_may_have_options_of_its_own(tmp_path: Path) -> None:
    adapter = "tests.test_collectives:ChoosyBackend"
    choosy = ("--backends", adapter, "--operations", "broadcast")
    content, shown = _run(tmp_path / "out.json", *choosy, "--chosen", "2")
    (series,) = content.series
    assert (series.backend, series.own_options) == (adapter, ["--chosen=2"])
    assert "ChoosyBackend --chosen=2" in shown
    # The option that changes no collective does not exist here.
    done = lockstep("allreduce", *choosy, "--other", "2")
    assert (done.returncode, "unrecognized arguments: --other 2" in done.stderr) == (2, True)


class FaultyBackend(DDPBackend):
    """Rank 1 goes wrong in the tenth barrier, in the way that the environment says."""

    name = "faulty"
    _num_barriers = 0

    def barrier(self) -> None:
        self._num_barriers += 1
        if self.rank == 1 and self._num_barriers == 10:
            self._go_wrong(os.environ["COLLECTIVES_FAULT"])
        super().barrier()

    def _go_wrong(self, fault: str) -> None:
        if fault == "raises":
            raise ArithmeticError("the planted error")
        if fault == "is-killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hangs":
            time.sleep(1000)


@needs_namespaces
@pytest.mark.slow
@pytest.mark.launchers
def test_each_rank_on_a_node_of_its_own(tmp_path: Path) -> None:
    require_backend("horovod")
    network = ("--engine", "netns", "--bandwidth", "100mbit", "--sizes", "64KB,1MB,4MB")
    content, _ = _run(tmp_path / "out.json", "--backends", "ddp,horovod", *network, "--operations", "all_reduce")
    assert content.network == "100mbit"
    assert [(one.backend, one.num_processes, one.transport) for one in content.series] == [
        *(("ddp", 2, "gloo"), ("horovod", 2, "gloo"))
    ]
    for series in content.series:
        assert 0 < 8 * series.points[-1].busbw < 110e6  # a node may send a burst at once
        assert series.fit is not None


@needs_namespaces
@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_that_goes_wrong_on_its_node_is_named(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    done = lockstep(
        *("allreduce", *TINY, "--backends", "tests.test_collectives:FaultyBackend", "--engine", "netns"),
        *("--output", output),
        env={"COLLECTIVES_FAULT": "raises"},
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "FaultyBackend with 2 ranks failed: " in done.stderr
    assert FAULTS["raises"] in done.stderr
    assert not output.exists()
    shutil.rmtree(_log(done.stderr).parents[1])


FAULTS = {
    "raises": "rank 1: ArithmeticError: the planted error",
    "is-killed": "rank 1: ended without a message",
    "hangs": "rank 1: is stuck: rank 0 waited for it without success",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_goes_wrong_ends_everything_by_name(tmp_path: Path, fault: str) -> None:
    output = tmp_path / "out.json"
    began = time.monotonic()
    done = lockstep(
        *("allreduce", *TINY, "--backends", "tests.test_collectives:FaultyBackend", "--timeout", "5"),
        *("--output", output),
        env={"COLLECTIVES_FAULT": fault},
    )
    assert time.monotonic() - began < stretched(60)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"lockstep: tests.test_collectives:FaultyBackend with 2 ranks failed: {FAULTS[fault]}"
    )
    assert len(done.stderr.splitlines()) == 2
    assert _log(done.stderr).exists()
    assert not output.exists()
    shutil.rmtree(_log(done.stderr).parents[2])


class WrongBackend(DDPBackend):
    """Its broadcasts from the first collective on are none."""

    name = "wrong"

    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        prepared = super().setup(model, optimizer)
        dist.broadcast = lambda values, src: None
        return prepared


@pytest.mark.slow
def test_a_collective_that_leaves_the_wrong_values_is_an_error(tmp_path: Path) -> None:
    done = lockstep(
        *("allreduce", *TINY, "--backends", "tests.test_collectives:WrongBackend", "--operations", "broadcast"),
        *("--output", tmp_path / "out.json"),
    )
    assert done.returncode == 1
    assert "rank 1: RuntimeError: broadcast of 256 values from each rank is wrong" in done.stderr
    assert "value 0 is 1.0 instead of 0.0" in done.stderr
    assert list(tmp_path.iterdir()) == []
    shutil.rmtree(_log(done.stderr).parents[2])


@pytest.mark.slow
def test_a_rank_that_stops_inside_a_library_that_waits_for_ever_is_named(tmp_path: Path) -> None:
    require_backend("horovod")
    command = [str(LOCKSTEP), "allreduce", "--backends", "horovod", "--sizes", "64MB", "--seconds-per-point", "600"]
    command += ["--timeout", "15", "--output", str(tmp_path / "out.json")]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _measuring_rank(job.pid, "1").suspend()
    _, stderr = job.communicate(timeout=180)
    assert job.returncode == 1
    assert "horovod with 2 ranks failed: rank 1: " in stderr
    shutil.rmtree(_log(stderr).parents[2])


def _measuring_rank(launcher: int, rank: str) -> psutil.Process:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        for process in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                is_rank = "compare.collectives.rank" in words and process.environ().get("HOROVOD_RANK") == rank
                if is_rank and (Path(words[words.index("compare.collectives.rank") + 2]) / "progress.jsonl").exists():
                    return process
        time.sleep(0.1)
    raise AssertionError("no rank has come as far as measuring")


def _log(stderr: str) -> Path:
    return Path(stderr.rpartition("more in ")[2].strip())


@pytest.mark.parametrize("damage", ["torn", "empty", "other-kind", "no-kind", "absent"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str, measured: tuple[CollectivesFile, str]) -> None:
    whole = json.loads(measured[0].model_dump_json())
    texts = {
        "torn": json.dumps(whole)[:-20],
        "empty": "",
        "other-kind": json.dumps({**whole, "kind": "race"}),
        "no-kind": json.dumps({name: value for name, value in whole.items() if name != "kind"}),
    }
    path = tmp_path / "file.json"
    if damage in texts:
        path.write_text(texts[damage])
    with pytest.raises((OSError, ValueError)):
        read_collectives(path)


def test_what_is_reduced_is_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses what is not; gloo, which the contract meets on a CPU, takes it."""
    reduced: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: reduced.append(tensor))
    transposed = torch.arange(6.0).reshape(2, 3).T
    result = all_reduce_in_group(transposed, "sum")
    assert reduced[0].is_contiguous()
    assert torch.equal(result, transposed)
