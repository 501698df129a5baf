"""Energy counters, planted: no machine of the tests need have any."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from compare.report.energy import describe_energy
from compare.report.runs import RaceFacts, Run, TurnFacts
from launch import doctor
from records.config import RunConfig
from records.energy import NoCountersError, gpu_counters, processor_counters
from records.record import EnergyRecord, Environment, RankRecord, RunRecord
from tests.launching import train
from training import energy
from training.energy import EnergyMeter

RANGE = 262_143_328_850  # of an Intel Xeon


def _plant(powercap: Path, zone: str, name: str, microjoules: int) -> Path:
    directory = powercap / zone
    directory.mkdir(parents=True)
    (directory / "name").write_text(f"{name}\n")
    (directory / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (directory / "energy_uj").write_text(f"{microjoules}\n")
    return directory / "energy_uj"


class FakeNVML(SimpleNamespace):
    """As much of pynvml as is used."""

    class NVMLError(Exception):
        pass

    def __init__(self, *millijoules: int) -> None:
        super().__init__(millijoules=list(millijoules), asked=[])

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.millijoules)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        self.asked.append(uuid)
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if self.millijoules[handle] < 0:
            raise self.NVMLError("Not Supported")
        return int(self.millijoules[handle])


def test_packages_and_their_memory_are_counted_and_no_part_twice(tmp_path: Path) -> None:
    for zone, name in {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:2": "psys",
        "intel-rapl-mmio:0": "package-0",
    }.items():
        _plant(tmp_path, zone, name, 5)
    (tmp_path / "intel-rapl").mkdir()
    assert [counter.name for counter in processor_counters(tmp_path)] == ["package-0", "dram", "package-1"]


def test_a_counter_that_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "_SECONDS_BETWEEN_READINGS", 0.0)
    counter, other = (_plant(tmp_path, f"intel-rapl:{n}", f"package-{n}", 0) for n in range(2))
    counter.write_text(str(RANGE - 1_000_000))
    meter = EnergyMeter(gpus=[], powercap=tmp_path)
    for reading in (2_000_000, RANGE - 500_000, 1_500_000):  # it begins again twice, seen each time
        counter.write_text(str(reading))
        meter.on_phase("forward", 1)
    other.write_text("7000000")
    record = meter.record()
    assert record.processor_joules == pytest.approx(1 + 2 + (RANGE * 1e-6 - 2.5) + 2 + 7, abs=1e-3)
    assert record.why_no_processor_joules is record.gpu_joules is record.why_no_gpu_joules is None
    assert record.seconds >= 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("none", "shows no energy counter, as on most virtual machines"),
        ("directory", "intel-rapl:0 cannot be read: [Errno 21] Is a directory"),
        ("text", "intel-rapl:0 cannot be read: invalid literal"),
        ("denied", "energy_uj may be read by root only"),
    ],
)
def test_a_machine_without_counters_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    if fault != "none":
        counter = _plant(tmp_path, "intel-rapl:0", "package-0", 5)
        counter.write_text("")
        if fault == "directory":
            counter.unlink()
            counter.mkdir()
        if fault == "denied":
            refused = PermissionError(13, "Permission denied")
            read_text = Path.read_text
            monkeypatch.setattr(
                Path, "read_text", lambda path: (_ for _ in ()).throw(refused) if path == counter else read_text(path)
            )
    with pytest.raises(NoCountersError) as told:
        processor_counters(tmp_path)
    assert reason in str(told.value)
    assert EnergyMeter(gpus=[], powercap=tmp_path).record().why_no_processor_joules == str(told.value)


def test_a_counter_that_vanishes_ends_no_training(tmp_path: Path) -> None:
    counter = _plant(tmp_path, "intel-rapl:0", "package-0", 5)
    meter = EnergyMeter(gpus=[], powercap=tmp_path)
    counter.unlink()
    record = meter.record()
    assert record.processor_joules is None
    assert record.why_no_processor_joules is not None
    assert record.why_no_processor_joules.startswith("the counters could not be read to the end: ")


def test_the_gpus_of_the_ranks_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNVML(1000, 2000, 3000)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = EnergyMeter(gpus=["GPU-1", "GPU-2"], powercap=tmp_path)
    assert nvml.asked == ["GPU-1", "GPU-2"]
    nvml.millijoules = [9000, 2500, 4000]
    assert meter.record().gpu_joules == pytest.approx(1.5)
    assert len(gpu_counters()) == 3
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reason = EnergyMeter(gpus=["GPU-1"], powercap=tmp_path).record().why_no_gpu_joules
    assert reason == "nvidia-ml-py is not installed; pip install nvidia-ml-py"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (FakeNVML(-1), "NVML does not count the energy of these GPUs: Not Supported"),
        (FakeNVML(), "NVML sees no GPU"),
        (None, "nvidia-ml-py is not installed; pip install nvidia-ml-py"),
    ],
)
def test_gpus_without_counters_are_told_why(
    monkeypatch: pytest.MonkeyPatch, module: FakeNVML | None, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(NoCountersError) as told:
        gpu_counters()
    assert str(told.value) == reason


def test_the_first_rank_of_a_node_records_it(tmp_path: Path) -> None:
    """In joules, or with the reason; the doctor tells the same before."""
    record = train("ddp", tmp_path / "run", "--task", "token-tagging", "--max-steps", "2")
    seen = record["ranks"][0]["energy"]
    assert (seen["processor_joules"] is None) != (seen["why_no_processor_joules"] is None)
    assert 0 < seen["seconds"] < record["seconds"]
    assert record["ranks"][1]["energy"] is None


def test_the_doctor_tells_what_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> None:
        raise NoCountersError("there is nothing")

    monkeypatch.setattr(doctor, "processor_counters", none)
    doctor.run([])
    assert "energy of a run: not of processors (there is nothing)" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "processor_counters", lambda: [SimpleNamespace(name="package-0")])
    doctor.run([])
    assert "energy of a run: processors (package-0)" in capsys.readouterr().out


def _run(*energy: EnergyRecord | None, turns: bool = False, network: str | None = None) -> Run:
    ranks = [RankRecord.model_construct(energy=one) for one in (*energy, None)][:2]
    config = RunConfig.model_construct(backend="ddp", num_processes=2, precision="fp32", diagnose=False)
    race = RaceFacts.model_construct(purpose="timed", entrant="ddp", turns=[TurnFacts.model_construct()])
    return Run(
        "run",
        RunRecord.model_construct(config=config, ranks=ranks, environment=Environment.model_construct(network=network)),
        race if turns else None,
    )


def test_a_report_says_what_runs_used_that_were_alone_or_why_it_is_not_known() -> None:
    counted = EnergyRecord(
        seconds=2.0, processor_joules=61.234, why_no_processor_joules=None, gpu_joules=None, why_no_gpu_joules="no GPU"
    )
    unknown = counted.model_copy(update={"processor_joules": None, "why_no_processor_joules": "there are no counters"})
    assert describe_energy([_run(counted), _run(counted, turns=True)]) == "ddp, 2 ranks, fp32: 61.2 J of processors"
    assert describe_energy([_run(unknown), _run(unknown, turns=True)]) == "not known: there are no counters"
    assert describe_energy([_run(counted, turns=True)]) == "known only of runs to the end, which --whole-runs adds"
    assert describe_energy([_run(None)]) is None
    assert describe_energy([_run(counted, counted)]) == "ddp, 2 ranks, fp32: 122 J of processors"
    # Hosts that this machine pretends to be have the same processors.
    assert describe_energy([_run(counted, counted, network="1gbit")]) == "ddp, 2 ranks, fp32: 61.2 J of processors"
