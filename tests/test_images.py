"""Images: drawn ones and files, what is learned of them, and what a task without tokens leaves behind."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageClassification

from compare.report.entrants import measure_entrant
from compare.report.grouping import EntrantRuns
from compare.report.runs import Run
from compare.results import Parity
from records.record import read_record
from tasks.images.classification import ImageClassification
from tasks.images.drawing import SHAPES, draw
from tasks.images.models import PRESETS, smallest_image
from tasks.images.settings import ImageClassificationSettings
from tests.idx_files import IMAGES, write_files
from tests.launching import lockstep

TASK = ("--task", "image-classification")


def _task(**settings: object) -> ImageClassification:
    task = ImageClassification(ImageClassificationSettings.model_validate(settings))
    task.prepare()
    return task


def test_every_machine_draws_the_same_images() -> None:
    images = draw(2000, seed=1)
    assert hashlib.sha256(images.pixels.tobytes()).hexdigest()[:16] == "bc562a3e92e25739"
    assert images.labels[:12].tolist() == [*range(10), 0, 1]
    assert (draw(2000, seed=2).pixels != images.pixels).any()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks learn, with what the command has said beside it."""
    directory = tmp_path_factory.mktemp("images") / "run"
    options = ("--num-train-samples", "2000", "--num-validation-samples", "500", "--num-train-epochs", "3")
    done = lockstep("ddp", *TASK, *options, "--num-processes", "2", "--sync-batchnorm", "--output-dir", directory)
    assert done.returncode == 0, done.stderr
    (directory / "stdout").write_text(done.stdout)
    return directory


def test_it_learns(run: Path) -> None:
    record = json.loads((run / "record.json").read_text())
    assert record["quality"]["accuracy"] > 0.9
    assert record["task"]["baseline"]["metrics"]["accuracy"] == 0.1


def test_it_leaves_no_word_of_tokens(run: Path) -> None:
    record = json.loads((run / "record.json").read_text())
    assert record["positions_per_token"] is None
    assert {one["positions_per_token"] for one in record["evaluations"]} == {None}
    assert record["imbalance"] == 1.0
    for rank in record["ranks"]:
        assert rank["tokens"] == rank["positions"] == []
        assert sum(rank["samples"]) == 3000
    shown = (run / "stdout").read_text()
    assert "token" not in shown
    assert re.search(r"images +28 x 28 +2,000 +500\n", shown)


def test_a_report_has_no_tokens_a_second(run: Path) -> None:
    timed = [Run("run", read_record(run / "record.json"), None)]
    entrant = measure_entrant(
        EntrantRuns("ddp", "", "ddp", "backend", timed), Parity(verdict="unknown", detail="nobody has looked"), []
    )
    assert entrant.samples_per_second is not None
    assert entrant.tokens_per_second is None
    assert "positions_per_token" not in entrant.settings


def test_transformers_loads_the_model(run: Path) -> None:
    model = AutoModelForImageClassification.from_pretrained(run)
    task = _task(num_train_samples=10, num_validation_samples=500)
    batch = task.collate("validation", range(500))
    with torch.no_grad():
        predicted = model(batch.tensors["pixel_values"]).logits.argmax(dim=1)
    accuracy = float((predicted == batch.tensors["labels"]).double().mean())
    assert accuracy == json.loads((run / "record.json").read_text())["quality"]["accuracy"]
    assert list(model.config.id2label.values()) == list(SHAPES)


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    task = _task(data_dir=write_files(tmp_path / "files", size=20))
    facts, written = task.describe(), draw(20, seed=20)
    assert facts["num_samples"] == {"train": 40, "validation": 20}
    assert (facts["image_size"], facts["labels"]) == ([20, 20], [str(number) for number in range(10)])
    batch = task.collate("validation", [7, 3])
    assert batch.tensors["labels"].tolist() == written.labels[[7, 3]].tolist()
    assert torch.equal(batch.tensors["pixel_values"][1, 0] * 255, torch.from_numpy(written.pixels[3, :20, :20]).float())


def test_classes_without_images_are_warned_of(tmp_path: Path) -> None:
    warnings = _task(data_dir=write_files(tmp_path / "files")).overview().warnings
    assert warnings == ("10 classes (0, 1, 2, 3, 4, ...) have fewer than 5 training images: too few to learn from",)


@pytest.mark.parametrize("model", PRESETS)
def test_batch_norm_has_several_values_of_a_single_image(model: str, tmp_path: Path) -> None:
    """Of a single value there is no variance: torch ends a training at it, be it in the last step of an epoch."""
    task = _task(model=model, data_dir=write_files(tmp_path / "files", size=9))
    sizes = []
    network = task.build_model()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.register_forward_hook(lambda module, values, _: sizes.append(values[0][0, 0].numel()))
    task.loss_sum(network, task.collate("train", [0])).backward()
    assert min(sizes) == 4
    smaller = torch.zeros(1, 1, smallest_image(model) - 1, smallest_image(model) - 1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        network(smaller)


def test_a_run_with_files_goes_on_where_they_are_the_same(tmp_path: Path) -> None:
    files = write_files(tmp_path / "files")
    run = tmp_path / "run"
    options = (*TASK, "--data-dir", files, "--global-batch-size", "20", "--num-processes", "2", "--save-every", "1")
    done = lockstep("ddp", *options, "--output-dir", run)
    assert done.returncode == 0, done.stderr
    other = write_files(tmp_path / "other", changes={IMAGES: (files / IMAGES).read_bytes()[:-8] + b"damaged!"})
    resume = ("--resume", run, "--output-dir", tmp_path / "on")
    refused = lockstep("ddp", *resume, "--data-dir", other)
    assert refused.returncode == 2
    assert "damaged" in refused.stderr
    moved = files.rename(tmp_path / "moved")
    done = lockstep("ddp", *resume, "--data-dir", moved)
    assert done.returncode == 0, done.stderr
