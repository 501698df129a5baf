"""Used rows of embeddings sent in place of whole gradients: held to the contract, the same bits, fewer bytes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from backends.bucket_settings import BucketSettings
from backends.capabilities import Place, UnsupportedError
from backends.embedding_rows import used_rows
from compare.report.traffic import excess_of
from records.record import read_record
from tests.launching import lockstep, require_backend, train
from tests.sparing import in_ci

ROWS = ("--embedding-gradients", "rows")
BERT = ("--model", "bert-tiny", "--max-seq-length", "16", "--max-steps", "6", "--no-evaluate", "--save-every", "never")
BACKENDS = ("ddp", "accelerate", "fabric")
# Gradients, weights, bits, traffic, half precision, overflow, unused parameters, and a rank that ends or hangs.
CLAUSES = "C09,C16,C17,C24,C25,C26,C27,C28,C30,C37,C38,C43"


@pytest.mark.slow
@pytest.mark.parametrize("backend", in_ci(["ddp"], BACKENDS))
@pytest.mark.parametrize("numbers_of_ranks", in_ci(["2"], ["2", "1,3,4"]))
def test_it_keeps_the_contract(backend: str, numbers_of_ranks: str) -> None:
    require_backend(backend)
    done = lockstep("contract", backend, *ROWS, "--num-processes", numbers_of_ranks, "--check", CLAUSES)
    assert done.returncode == 0, done.stdout + done.stderr
    num_passed = 12 if numbers_of_ranks == "2" else 11  # C24 is about the bits of two ranks
    assert f"{backend} --embedding-gradients rows on cpu: {num_passed} passed" in done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_get_the_bits_of_whole_gradients_for_fewer_bytes(tmp_path: Path, backend: str) -> None:
    """In several buckets, too, of which only one has the embedding of 30,522 rows; BERT has two more."""
    require_backend(backend)
    options = (*BERT, "--num-processes", "2", "--diagnose", "--threads-per-rank", "1")
    whole = train(backend, tmp_path / "whole", *options)
    rows = train(backend, tmp_path / "rows", *options, *ROWS, "--bucket-cap-mb", "1")
    assert {rank["weights_sha256"] for rank in rows["ranks"]} == {whole["ranks"][0]["weights_sha256"]}
    assert {rank["effective_settings"]["embedding_gradients"] for rank in rows["ranks"]} == {"rows"}
    assert "embedding_gradients" not in whole["ranks"][0]["effective_settings"]
    sent, all_of_it = (sum(one["ranks"][0]["diagnosis"]["reduced_bytes"][-1].values()) for one in (rows, whole))
    assert all_of_it == whole["ranks"][0]["diagnosis"]["gradient_bytes"]
    in_tables = 4 * 128 * (30_522 + 512 + 2)
    assert all_of_it - in_tables < sent < all_of_it - 0.9 * in_tables


def test_a_report_expects_no_more_than_was_to_be_sent(tmp_path: Path) -> None:
    train("ddp", tmp_path / "run", *BERT, "--num-processes", "2", "--diagnose", *ROWS)
    excess = excess_of(read_record(tmp_path / "run" / "record.json"))
    assert excess is not None
    assert 1 <= excess < 1.2  # headers of packets, and steps that use other rows


def test_one_rank_sends_no_rows(tmp_path: Path) -> None:
    record = train("ddp", tmp_path / "run", *BERT, "--num-processes", "1", *ROWS)
    assert record["ranks"][0]["effective_settings"]["embedding_gradients"] == "whole"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_row_is_used_unless_all_of_it_is_zero(dtype: torch.dtype) -> None:
    gradient = torch.zeros(3000, 128, dtype=dtype)
    gradient[0, 127] = math.nan
    gradient[7, 3] = -math.inf
    gradient[1023, 0] = torch.finfo(dtype).smallest_normal
    gradient[1024, 0] = -torch.finfo(dtype).smallest_normal
    gradient[2000] = -0.0
    gradient[2999, :2] = torch.tensor([1.0, -1.0])
    assert used_rows(gradient).nonzero().squeeze(1).tolist() == [0, 7, 1023, 1024, 2999]


def test_it_is_refused_on_gpus() -> None:
    settings = BucketSettings(embedding_gradients="rows")
    with pytest.raises(UnsupportedError, match="--embedding-gradients rows is for ranks that compute on CPUs"):
        settings.check(precision="fp32", optimizer="adamw", grad_compression="none", place=Place("cuda", 1))


def test_a_forecast_does_not_know_how_many_rows_are_used(tmp_path: Path) -> None:
    done = lockstep("forecast", "profile", "ddp", *ROWS, "--output-dir", tmp_path / "profile")
    assert done.returncode == 2
    assert "--embedding-gradients rows: how many rows a step uses is not in the model" in done.stderr
    assert not (tmp_path / "profile").exists()
