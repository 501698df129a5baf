"""The paced task: gradients of BERT's sizes that come as slowly as from a device, whichever computer runs it."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.interface import Split
from tasks.paced import Paced, PacedSettings
from tasks.paced_model import PacedBert
from tasks.text.models import build_preset
from tests.launching import lockstep, train

SIZES = {"num_layers": 2, "hidden_size": 128, "vocab_size": 100}


@pytest.mark.parametrize("name", ["bert-tiny", "bert-mini"])
def test_it_has_the_parameters_of_bert(name: str) -> None:
    with torch.device("meta"):
        bert = build_preset(name, labels=["no", "yes"], pad_token_id=0, dropout=0.0, vocab_size=100)
        paced = Paced(PacedSettings(model=name, vocab_size=100)).build_model()
    ours, theirs = ([tuple(one.shape) for one in model.parameters()] for model in (paced, bert))
    assert sorted(ours) == sorted(theirs)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_its_gradients_are_those_of_its_loss(split: Split) -> None:
    task = Paced(PacedSettings(model="bert-tiny", vocab_size=100, samples_per_second=1e6))
    model = task.build_model().double()
    total = sum(float(one.detach().mean()) for one in model.parameters())
    loss = task.loss_sum(model, task.collate(split, [3, 0, 7]))
    loss.backward()  # type: ignore[no-untyped-call]
    # Each of three samples asks for one more than its input, and gets the sum of all means more.
    assert loss.item() == pytest.approx(3 * 0.5 * (total - 1) ** 2, rel=1e-5)
    for one in model.parameters():
        assert one.grad is not None
        torch.testing.assert_close(one.grad, torch.full_like(one, 3 * (total - 1) / one.numel()), rtol=1e-5, atol=0)
    assert task.evaluation_rows(model, task.collate(split, [3, 0, 7])).sum().item() == pytest.approx(loss.item())


def test_layers_are_as_slow_as_the_device() -> None:
    """A forward pass takes a third, and each layer its part of the other two thirds, the last one first."""
    model = PacedBert(**SIZES, seconds_per_sample=0.03)
    ready: dict[str, float] = {}

    def note(name: str, _: torch.Tensor) -> None:
        ready[name] = time.perf_counter()

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(note, name))  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    output = model(torch.zeros(4))
    between = time.perf_counter()
    output.sum().backward()
    assert between - began >= 0.04
    layers = [min(when for name, when in ready.items() if name.startswith(f"layers.{number}.")) for number in (0, 1)]
    assert layers[1] - between >= 0.04
    assert layers[0] - between >= 0.08
    # The gradients of the last layer are there while the first one still waits.
    assert max(when for name, when in ready.items() if name.startswith("layers.1.")) < layers[0]
    assert max(ready.values()) == max(when for name, when in ready.items() if name.startswith("embeddings."))
    assert min(ready.values()) == min(when for name, when in ready.items() if name.startswith("head."))


def test_what_a_process_computes_counts_as_part_of_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("tasks.paced_model.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("tasks.paced_model.time.sleep", sleep)
    model = PacedBert(**SIZES, seconds_per_sample=1.0)
    for layer, seconds in zip(model.layers, (0.1, 0.3), strict=True):
        layer.register_forward_hook(lambda *_, seconds=seconds: now.__setitem__(0, now[0] + seconds))
    model(torch.zeros(1)).sum().backward()
    sixth = 1 / 6  # of a second: what the forward pass of one of two layers takes
    # The second layer is late by then, and its backward pass begins when its forward pass has ended.
    assert slept == pytest.approx([sixth - 0.1, 2 * sixth, 2 * sixth])


def test_two_ranks_end_where_one_process_ends(tmp_path: Path) -> None:
    options = ("--task", "paced", "--model", "bert-tiny", "--vocab-size", "100", "--samples-per-second", "2000")
    records = {
        backend: train(backend, tmp_path / backend, *options, "--max-steps", "5") for backend in ("single", "ddp")
    }
    one, two = (load_file(tmp_path / backend / "model.safetensors") for backend in records)
    assert one.keys() == two.keys()
    for name, weights in one.items():
        torch.testing.assert_close(weights, two[name], rtol=1e-5, atol=1e-6)
    for record in records.values():
        assert record["quality"]["loss"] > 0
        samples = record["config"]["global_batch_size"] / record["config"]["num_processes"]
        assert min(record["ranks"][0]["step_seconds"]) >= samples / 2000


@pytest.mark.parametrize("words", [("--samples-per-second", "0"), ("--vocab-size", "0"), ("--model", "bert-huge")])
def test_bad_input_is_named(tmp_path: Path, words: tuple[str, str]) -> None:
    done = lockstep("single", "--task", "paced", *words, "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert " ".join(words) in done.stderr
    assert not (tmp_path / "run").exists()
