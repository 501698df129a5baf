"""The job that `launch/run.sh BACKEND` does without options: BERT learns what word counts cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import train
from tests.test_grammar import bag_of_words_accuracy


@pytest.mark.slow
def test_bert_learns_the_embedded_data(tmp_path: Path) -> None:
    record = train("ddp", tmp_path / "run")
    assert record["task"]["majority_share"]["validation"] <= 0.60
    assert record["quality"]["accuracy"] >= 0.90
    assert record["quality"]["accuracy"] >= bag_of_words_accuracy() + 0.25
    assert record["quality"]["roc_auc"] >= 0.95
