"""Apex: what tells its installations apart, the adapter's calls, and Apex's own Python code under the contract."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backends import registry
from backends.apex_settings import ApexSettings
from backends.capabilities import Capabilities, UnsupportedError
from backends.interface import BackendOptions
from contract.check import State
from contract.options import ContractOptions
from contract.suite import Suite
from launch.doctor import run as doctor
from tests import apex_double
from tests.apex_double import CALLS
from tests.launching import lockstep

# Detection.

_HERE = {"amp": "", "parallel": "", "multi_tensor_apply": ""}
INSTALLATIONS = {
    "nothing": ({}, 1, "apex is not installed"),
    "the package of PyPI": ({"lib": "", "models": ""}, 1, "Pyramid toolkit"),
    "after 25.04": ({"multi_tensor_apply": "", "optimizers": ""}, 1, "removed after tag 25.04"),
    "without a GPU": (_HERE, 0, "needs a CUDA GPU"),
}


def _install(path: Path, monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], num_gpus: int) -> None:
    for package in packages:
        (path / "apex" / package).mkdir(parents=True)
        (path / "apex" / "__init__.py").touch()
    # One that was imported before would be found first.
    for module in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.setattr(registry, "count_gpus", lambda: num_gpus)


@pytest.mark.parametrize("name", INSTALLATIONS)
def test_each_wrong_apex_has_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    packages, num_gpus, words = INSTALLATIONS[name]
    if not packages and find_spec("apex"):
        pytest.skip("some apex is installed here")
    _install(tmp_path, monkeypatch, packages, num_gpus)
    doctor([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("apex:")]
    assert len(lines) == 1
    assert words in lines[0]


@pytest.mark.parametrize("with_kernels", [False, True])
def test_apex_without_its_kernels_is_remarked_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], with_kernels: bool
) -> None:
    _install(tmp_path, monkeypatch, _HERE, num_gpus=1)
    if with_kernels:
        (tmp_path / "amp_C.py").touch()
    doctor([])
    out = capsys.readouterr().out
    assert ("apex: apex runs without its compiled kernels" in out) == (not with_kernels)
    (row,) = [line for line in out.splitlines() if line.startswith("apex ")]
    assert "yes" in row.split()


# Options.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--opt-level", "O3"), ("--opt-level O3", "'O0', 'O1' or 'O2'")),
        (
            ("--opt-level", "O2", "--precision", "fp32"),
            ("--opt-level O2 computes in fp16", "leave --precision fp32 out"),
        ),
        (
            ("--opt-level", "O0", "--precision", "fp16"),
            ("--opt-level O0 computes in fp32", "leave --precision fp16 out"),
        ),
        (("--fused-adam", "--optimizer", "sgd"), ("--fused-adam", "--optimizer sgd")),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = lockstep("apex", *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_fused_adam_without_kernels_is_refused_before_any_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("amp_C"):
        pytest.skip("the kernels are installed here")
    ApexSettings().check_machine(start_method="torchrun")
    with pytest.raises(UnsupportedError, match="--fused-adam: this Apex was built without its kernels"):
        ApexSettings(fused_adam=True).check_machine(start_method="torchrun")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "amp_C.py").touch()
    ApexSettings(fused_adam=True).check_machine(start_method="torchrun")


def test_options_of_apex_are_options_of_apex_alone() -> None:
    done = lockstep("ddp", "--delay-allreduce")
    assert done.returncode == 2
    assert "unknown option --delay-allreduce" in done.stderr


def test_bf16_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="leaves bfloat16 gradients out"):
        registry.BACKENDS["apex"].capabilities.check(name="apex", device="cuda", precision="bf16")


@pytest.mark.parametrize(("level", "precision"), [("O0", "fp32"), ("O1", "fp16"), ("O2", "fp16"), (None, None)])
def test_a_level_implies_its_precision(level: Any, precision: str | None) -> None:
    assert ApexSettings(opt_level=level).implied_precision == precision


# The adapter's calls, against a double.


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The adapter's class, on a double of Apex, in a group of one."""
    apex_double.install(monkeypatch)
    module = importlib.import_module("backends.apex")
    monkeypatch.setattr(module.ApexBackend, "capabilities", Capabilities({"cpu": ("fp32", "fp16")}, ("torchrun",)))
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", _joined_through(dist.init_process_group, tmp_path / "store"))
    yield module.ApexBackend
    if dist.is_initialized():
        dist.destroy_process_group()
    monkeypatch.undo()


def _joined_through(join: Any, path: Path) -> Any:
    return lambda transport, **options: join(transport, init_method=f"file://{path}", rank=0, world_size=1)


def _window(backend: Any, *, losses: tuple[float, ...]) -> Any:
    """One optimizer step of a tiny model, a micro-batch for each factor of the loss."""
    model = torch.nn.Linear(2, 1)
    wrapped, _ = backend.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    CALLS.append("--")
    for number, factor in enumerate(losses):
        if number < len(losses) - 1:
            with backend.no_sync():
                backend.backward(wrapped(torch.ones(1, 2)).sum() * factor)
        else:
            backend.backward(wrapped(torch.ones(1, 2)).sum() * factor)
    return backend.step(1.0)


def test_setup_initializes_then_wraps(adapter: Any) -> None:
    backend = adapter(BackendOptions(precision="fp16", settings=ApexSettings()))
    _window(backend, losses=(1.0,))
    assert CALLS[: CALLS.index("--")] == ["initialize O1", "wrap", "zero_grad"]
    # Another training in the same process starts from torch as it was.
    CALLS.clear()
    _window(backend, losses=(1.0,))
    assert CALLS[:3] == ["take back the patches", "initialize O1", "wrap"]


@pytest.mark.parametrize("settings", [ApexSettings(), ApexSettings(opt_level="O0"), ApexSettings(delay_allreduce=True)])
def test_settings_reach_apex(adapter: Any, settings: ApexSettings) -> None:
    precision = settings.implied_precision or "fp16"
    backend = adapter(BackendOptions(precision=precision, settings=settings))
    _window(backend, losses=(1.0,))
    effective = backend.effective_settings()
    assert effective["opt_level"] == (settings.opt_level or "O1")
    assert effective["delay_allreduce"] == settings.delay_allreduce
    assert effective["fused_kernels"] is False


def test_reduction_is_switched_before_the_forward_and_unscaling_delayed(adapter: Any) -> None:
    backend = adapter(BackendOptions(precision="fp16", settings=ApexSettings()))
    result = _window(backend, losses=(1.0, 1.0))
    assert CALLS[CALLS.index("--") + 1 :] == [
        "disable_allreduce",
        "forward",
        "backward, unscale later",
        "enable_allreduce",
        "forward",
        "backward, unscale",
        "master_params",
        "step",
        "zero_grad",
    ]
    assert not result.skipped


def test_a_skipped_step_is_still_called_and_not_clipped(adapter: Any) -> None:
    backend = adapter(BackendOptions(precision="fp16", settings=ApexSettings()))
    result = _window(backend, losses=(float("inf"),))
    assert CALLS[-2:] == ["skip", "zero_grad"]
    assert "master_params" not in CALLS
    assert result.skipped


def test_a_wrapped_model_is_refused(adapter: Any) -> None:
    backend = adapter(BackendOptions(precision="fp16", settings=ApexSettings()))
    wrapped = apex_double.DistributedDataParallel(torch.nn.Linear(1, 1), delay_allreduce=True)
    with pytest.raises(ValueError, match=r"amp.initialize must come before the wrapper"):
        backend.setup(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))


def test_kernels_know_no_float64(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = adapter(BackendOptions(settings=ApexSettings()))
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backend.setup(model, optimizer)  # Python does
    monkeypatch.setattr(sys.modules["backends.apex"].multi_tensor_applier, "available", True)
    with pytest.raises(UnsupportedError, match="apex cannot train weight, which is float64"):
        backend.setup(model, optimizer)


def test_fused_adam_needs_the_kernels(adapter: Any) -> None:
    with pytest.raises(UnsupportedError, match="without its kernels"):
        adapter(BackendOptions(settings=ApexSettings(fused_adam=True)))


def test_fused_adams_checkpoints_are_those_of_torchs_adamw(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number of steps, on which the size of a step depends: torch goes on from there, and the other way."""
    monkeypatch.setattr(sys.modules["backends.apex"].multi_tensor_applier, "available", True)
    backend = adapter(BackendOptions(settings=ApexSettings(fused_adam=True)))
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    wrapped, fused = backend.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.7)))
    torchs = torch.optim.AdamW(other.parameters(), lr=0.1, betas=(0.5, 0.7))

    def step_fused() -> None:
        backend.backward(wrapped(torch.tensor([[1.0, 2.0, 3.0]])).square().sum())
        backend.step(0.0)

    def step_torchs() -> None:
        other(torch.tensor([[1.0, 2.0, 3.0]])).square().sum().backward()
        torchs.step()
        torchs.zero_grad()

    assert fused.state_dict()["state"] == {}
    for _ in range(3):
        step_fused()
    other.load_state_dict(model.state_dict())
    torchs.load_state_dict({**torchs.state_dict(), "state": deepcopy(fused.state_dict()["state"])})
    for values in torchs.state.values():
        assert torch.equal(values["step"], torch.tensor(3.0))
    step_fused()
    step_torchs()
    torch.testing.assert_close([*other.parameters()], [*model.parameters()])

    step_torchs()
    model.load_state_dict(other.state_dict())
    groups = fused.state_dict()["param_groups"]
    assert all("step" not in group for group in groups)
    fused.load_state_dict({"state": deepcopy(torchs.state_dict()["state"]), "param_groups": groups})
    assert [group["step"] for group in fused.param_groups] == [5]
    assert all(values.keys() == {"exp_avg", "exp_avg_sq"} for values in fused.state.values())
    step_fused()
    step_torchs()
    torch.testing.assert_close([*other.parameters()], [*model.parameters()])


def test_fused_adam_has_one_number_of_steps(adapter: Any) -> None:
    load = sys.modules["backends.apex"].steps_in_groups
    saved: dict[str, Any] = {"param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    saved["state"] = {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.tensor(2.0)}}
    with pytest.raises(ValueError, match="different numbers of steps"):
        load(None, saved)
    saved["state"][1] = {"exp_avg": torch.zeros(1)}
    with pytest.raises(ValueError, match="lacks the number of steps"):
        load(None, saved)


def test_the_scaler_speaks_torchs_format(adapter: Any) -> None:
    backend = adapter(BackendOptions(precision="fp16", init_loss_scale=8.0, settings=ApexSettings()))
    _window(backend, losses=(1.0,))
    assert set(backend.state_dict()) == set(torch.amp.GradScaler("cpu").state_dict())
    backend.load_state_dict(torch.amp.GradScaler("cpu", init_scale=4.0).state_dict())
    assert CALLS[-1] == "load scale 4"


# Apex's own Python code.


def _has_real_apex() -> bool:
    return all(find_spec(name) for name in ("apex", "apex.amp", "apex.parallel")) if find_spec("apex") else False


def _with_apex() -> dict[str, str]:
    """Lets ranks find the Apex that was found here."""
    source = find_spec("apex")
    assert source is not None
    assert source.submodule_search_locations
    origin = Path(next(iter(source.submodule_search_locations))).parent
    return {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(origin)])}


real_apex = pytest.mark.skipif(
    not _has_real_apex() or torch.cuda.is_available(),
    reason="the source of Apex 25.04 is not on PYTHONPATH (or here is a GPU, where it runs for real)",
)


@real_apex
@pytest.mark.parametrize("adapter_name", ["ApexO1OnCpu", "ApexO1DelayedOnCpu", "ApexO2OnCpu"])
def test_real_apex_keeps_the_contract_on_stand_ins_for_cuda(tmp_path: Path, adapter_name: str) -> None:
    target = tmp_path / "out.json"
    done = lockstep(
        "contract", f"tests.apex_on_cpu:{adapter_name}", "--num-processes", "1,2", "--json", target, timeout=600,
        env=_with_apex(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert State.PASSED.value in target.read_text()


@real_apex
@pytest.mark.parametrize("adapter_name", ["ApexO1OnCpu", "ApexO2OnCpu"])
def test_bert_trains_under_the_code_of_apex(tmp_path: Path, adapter_name: str) -> None:
    """O2 turns the outputs of the model into a plain dictionary, O1 replaces functions that the task calls."""
    options = ("--precision", "fp16", "--init-loss-scale", "1024", "--max-steps", "20", "--num-processes", "2")
    done = lockstep(f"tests.apex_on_cpu:{adapter_name}", *options, "--output-dir", tmp_path / "run", env=_with_apex())
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert not any(step["skipped"] for step in record["steps"])
    assert record["steps"][-1]["loss"] < record["steps"][0]["loss"]
    assert record["ranks"][0]["effective_settings"]["opt_level"] == adapter_name.removeprefix("Apex")[:2]


def test_apex_is_held_to_every_check() -> None:
    assert {instance.check.id for instance in Suite("apex", Path(), ContractOptions()).instances}
