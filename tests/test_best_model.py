"""The weights of the best evaluation are kept, and early stopping ends a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from records.checkpoint import checkpoint_path, checkpoint_step, list_checkpoints, read_checkpoint
from records.record import EvaluationRecord, by_merit, read_record
from tests.launching import lockstep, run_config, train
from tests.resuming import RUN, weights


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_the_best_model_is_kept_and_patience_ends(tmp_path: Path, metric: str) -> None:
    """With a run that is broken after the best evaluation and before the end."""
    run, on = tmp_path / "run", tmp_path / "on"
    options = (*RUN, "--learning-rate", "0.5", "--num-train-epochs", "12", "--keep", "2", "--save-every", "3")
    options = (*options, "--metric-for-best-model", metric, "--early-stopping-patience", "2")
    record = train("ddp", run, *options)
    values = [one["metrics"][metric] for one in record["evaluations"]]
    assert len(values) < 12
    best = values.index((max if metric == "accuracy" else min)(values))
    assert len(values) == best + 1 + 2
    assert record["best_step"] == record["evaluations"][best]["step"]
    assert record["quality"] == record["evaluations"][best]["metrics"]
    kept = read_checkpoint(checkpoint_path(run, record["best_step"]))
    for name, weight in weights(run).items():
        assert torch.equal(weight, kept.tensors[f"model.{name}"])
    assert kept.state.best is not None
    assert kept.state.best.step == record["best_step"]
    later = [path for path in list_checkpoints(run) if checkpoint_step(path) > record["best_step"]]
    assert later
    resumed = train("horovod", on, "--resume", later[-1])
    assert [one["metrics"] for one in resumed["evaluations"]] == [one["metrics"] for one in record["evaluations"]]
    assert resumed["best_step"] == record["best_step"]
    assert (on / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_best_model_is_lost(tmp_path: Path) -> None:
    """The next best is kept, and the summary says so; a lone checkpoint can be gone on from, too."""
    run = tmp_path / "run"
    options = (*RUN, "--num-train-epochs", "6", "--learning-rate", "1.0", "--metric-for-best-model", "accuracy")
    record = train("single", run, *options)
    assert record["best_step"] < 11  # so that a run which goes on afterwards has lost it
    config = read_record(run / "record.json").config
    ranking = by_merit([EvaluationRecord.model_validate(one) for one in record["evaluations"]], config)
    best = checkpoint_path(run, record["best_step"])
    assert checkpoint_step(best) == ranking[0].step
    start = checkpoint_path(run, max(step for step in range(1, 12) if step != record["best_step"]))
    content = bytearray(best.read_bytes())
    content[-1] ^= 1
    best.write_bytes(content)
    done = lockstep("single", "--resume", start, "--output-dir", tmp_path / "damaged")
    lone = shutil.copyfile(start, tmp_path / start.name)
    alone = lockstep("single", "--resume", lone, "--output-dir", tmp_path / "alone")
    assert done.returncode == alone.returncode == 0, done.stderr + alone.stderr
    assert f"the best model so far is missing ({best.parent.parent.parent / best.name})" in alone.stdout
    for place, printed in (("damaged", done.stdout), ("alone", alone.stdout)):
        went_on = json.loads((tmp_path / place / "record.json").read_text())
        assert went_on["best_step"] not in (None, ranking[0].step)
        assert f"NOT BEST  the better weights of step {ranking[0].step} are lost" in printed
        (rated,) = [one for one in went_on["evaluations"] if one["step"] == went_on["best_step"]]
        assert went_on["quality"] == rated["metrics"]


@pytest.mark.slow
def test_a_metric_that_is_not_computed(tmp_path: Path) -> None:
    done = lockstep("single", *RUN, "--metric-for-best-model", "bleu", "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert "--metric-for-best-model bleu: the task computes loss, accuracy, macro_f1; choose one" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("metric", "greater", "best"), [("perplexity", False, 1), ("loss", None, 1), ("f1", None, 2)])
def test_which_values_are_better(tmp_path: Path, metric: str, greater: bool | None, best: int) -> None:
    options = {"micro_batch_size": 8, "metric_for_best_model": metric, "greater_is_better": greater}
    config = run_config("single", 1, tmp_path, **options)
    evaluations = [
        EvaluationRecord(step=step, epoch=0, seconds=1.0, metrics={metric: value})
        for step, value in ((1, 2.0), (2, 9.0), (3, None), (4, 2.0))
    ]
    assert [one.step for one in by_merit(evaluations, config)] == ([1, 4, 2] if best == 1 else [2, 1, 4])
    assert by_merit(evaluations, config.model_copy(update={"metric_for_best_model": None})) == []


def test_better_needs_a_metric(tmp_path: Path) -> None:
    done = lockstep("single", "--no-greater-is-better", "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert "--no-greater-is-better: --metric-for-best-model is missing; name the metric" in done.stderr
    assert not (tmp_path / "run").exists()
