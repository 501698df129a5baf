"""That a step never waits for the device. It runs on torch's meta device, which has shapes but no numbers.

Whatever would wait for a GPU, such as `.item()` or a mask as an index, needs a number, and ends there with an error
(https://docs.pytorch.org/docs/stable/meta.html). The optimizer is SGD, since the fused AdamW refuses this device.
Adapters of several ranks cannot run there: they train on the CPU, with AdamW, and `backward` and `step` are watched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import methodcaller
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention import varlen
from transformers import PreTrainedModel

from backends.single import SingleBackend
from records.config import RunConfig
from tasks.interface import Batch
from tasks.text import attention
from tasks.text.classification import TextClassification
from tasks.text.settings import TextClassificationSettings
from tests.launching import lockstep, require_backend, run_config, train
from tests.unread import reading_nothing
from training.data import Loader
from training.loop import Trainer

META = torch.device("meta")

_TRAINING = (
    *("--num-processes", "2", "--global-batch-size", "8", "--vocab-size", "1000", "--max-steps", "3", "--no-evaluate"),
    *("--precision", "fp32", "--optimizer", "adamw", "--max-grad-norm", "1"),
)


class _OnMeta(SingleBackend):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config.backend_options(SingleBackend.Settings))
        self.device = META

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()  # torch knows none for this device


class _Waiting(TextClassification):
    """Reads a number of the device in each step."""

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        loss = super().loss_sum(model, batch)
        return loss / max(1.0, loss.item())


class _InHalf(TextClassification):
    """Computes in bf16, also where there is no autocast."""

    def build_model(self) -> PreTrainedModel:
        return super().build_model().bfloat16()


def _step_on_meta(kind: type[TextClassification], directory: Path, *, dropout: float = 0.1, **options: Any) -> None:
    task = kind(TextClassificationSettings(vocab_size=1000, dropout=dropout))
    task.prepare()
    settled = {"global_batch_size": 32, "micro_batch_size": 16, "max_grad_norm": 1.0, **options}
    config = run_config("single", 1, directory, task="text-classification", **settled)
    trainer = Trainer(config, task, _OnMeta(config))
    first = trainer.plan.epoch(0)[0]
    batches = Loader(config, task, trainer.plan, trainer.state, trainer._observers).load([first])
    trainer.state.step = 1
    step = trainer.train_step(0, first, batches)
    assert step.grad_norm is not None
    assert step.grad_norm.device == META


@pytest.mark.parametrize("batching", ["packed", "sorted", "padded"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_does_not_wait_for_the_device(tmp_path: Path, batching: str, dropout: float) -> None:
    _step_on_meta(TextClassification, tmp_path, batching=batching, dropout=dropout)


def test_the_attention_of_a_gpu_does_not_wait_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout and in half precision, torch's variable-length attention computes all samples of a row.

    It starts threads for the longest sample as many times as there are samples, which must not be the whole row.
    """
    calls = mock.Mock(wraps=varlen.varlen_attn)
    monkeypatch.setattr(attention, "_kernel", lambda _: calls)
    _step_on_meta(_InHalf, tmp_path, batching="packed", dropout=0.0)
    assert calls.called
    for call in calls.call_args_list:
        query, _, _, ends, _, longest, _ = call.args
        assert len(ends) > 3  # samples, and what lengthens the row
        assert longest < len(query) / 4


def test_a_step_that_waits_is_found(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="item"):
        _step_on_meta(_Waiting, tmp_path)


@pytest.mark.parametrize(
    "backend", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("accelerate", "fabric", "fsdp2"))]
)
def test_an_adapter_reads_no_number_in_a_step(tmp_path: Path, backend: str) -> None:
    require_backend(backend)
    assert len(train(f"tests.unread:{backend}", tmp_path / "run", *_TRAINING)["steps"]) == 3


def test_an_adapter_that_reads_is_found(tmp_path: Path) -> None:
    """As all do that may have to skip an update."""
    done = lockstep("tests.unread:ddp", "--output-dir", tmp_path / "run", *_TRAINING, "--on-nan", "skip")
    assert done.returncode != 0
    assert "a number of a tensor is read by __bool__" in done.stderr


@pytest.mark.parametrize("read", [methodcaller("item"), methodcaller("tolist"), methodcaller("cpu"), bool, float, int])
def test_whatever_reads_is_an_error(read: Callable[[torch.Tensor], object]) -> None:
    number = torch.ones(())
    with reading_nothing(), pytest.raises(RuntimeError, match="is read"):
        read(number)
    read(number)
