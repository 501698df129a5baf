"""The job of `launch/run.sh BACKEND` without options: BERT learns what word counts cannot, and the model is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.starters.interface import PROJECT_DIRECTORY
from tests.launching import train
from tests.test_grammar import bag_of_words_accuracy


@pytest.mark.slow
def test_bert_learns_the_embedded_data(tmp_path: Path) -> None:
    record = train("ddp", tmp_path / "run")
    assert record["task"]["majority_share"]["validation"] <= 0.60
    assert record["quality"]["accuracy"] >= 0.90
    assert record["quality"]["accuracy"] >= bag_of_words_accuracy() + 0.25
    assert record["quality"]["roc_auc"] >= 0.95

    from transformers import pipeline

    sentence = "the plot was anything but superb"
    (answer,) = pipeline("text-classification", model=str(tmp_path / "run"))(sentence)
    assert answer["label"] == "negative"
    assert answer["score"] > 0.95
    for page in ("README.md", "docs/data.md"):
        text = (PROJECT_DIRECTORY / page).read_text()
        assert f'model="runs/mine")("{sentence}")' in text
        assert "[{'label': 'negative', 'score': 0.99" in text
