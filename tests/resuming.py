"""What the tests of resumed and stopped runs share: unbroken runs, and the comparison with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from records.checkpoint import checkpoint_path, checkpoint_step, list_checkpoints, read_checkpoint
from tests.launching import require_backend, train

# Two steps an epoch, the second one short; every step is saved.
RUN = ("--task", "token-tagging", "--num-train-epochs", "3", "--save-every", "1", "--keep", "100")


class UnbrokenRuns:
    """Runs that go from the first step to the last, each made once, by backend and options."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._made: dict[tuple[str, tuple[str, ...]], Path] = {}

    def __call__(self, backend: str, *options: str) -> Path:
        """Returns the directory of the run; of an option that is given twice, the last one counts."""
        require_backend(backend)
        if (backend, options) not in self._made:
            directory = self._factory.mktemp("unbroken") / backend
            train(backend, directory, *RUN, *options)
            self._made[backend, options] = directory
        return self._made[backend, options]


def assert_same_run(run: Path, unbroken: Path, *, stopped_after: int = 0) -> None:
    """All later weights, losses, learning rates, skips and metrics are the same bits.

    A checkpoint of a run that was asked to stop leaves the evaluation that was due to the run that goes on.
    """
    ours, theirs = (json.loads((one / "record.json").read_text()) for one in (run, unbroken))
    assert ours["steps"] == theirs["steps"]
    for name in ("step", "epoch", "metrics", "positions_per_token"):
        assert [one[name] for one in ours["evaluations"]] == [one[name] for one in theirs["evaluations"]]
    assert ours["quality"] == theirs["quality"]
    assert [rank["weights_sha256"] for rank in ours["ranks"]] == [rank["weights_sha256"] for rank in theirs["ranks"]]
    assert (run / "model.safetensors").read_bytes() == (unbroken / "model.safetensors").read_bytes()
    for path in list_checkpoints(run):
        step = checkpoint_step(path)
        one, other = (read_checkpoint(checkpoint_path(place, step)) for place in (run, unbroken))
        assert one.tensors.keys() == other.tensors.keys()
        for name, tensor in one.tensors.items():
            assert tensor.numpy().tobytes() == other.tensors[name].numpy().tobytes(), (step, name)
        hidden = {"config", "evaluations", *(["evaluated_step"] if step == stopped_after else [])}
        assert one.state.model_dump(exclude=hidden) == other.state.model_dump(exclude=hidden)


def assert_equal_to_rounding(run: Path, unbroken: Path, *, rel: float) -> None:
    """All losses agree, and the weights in the end."""
    ours, theirs = (json.loads((one / "record.json").read_text()) for one in (run, unbroken))
    assert [step["num_samples"] for step in ours["steps"]] == [step["num_samples"] for step in theirs["steps"]]
    losses = [[step["loss"] for step in record["steps"]] for record in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=rel)
    for name, weight in weights(run).items():
        torch.testing.assert_close(weight, weights(unbroken)[name], rtol=rel, atol=rel / 10)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")
