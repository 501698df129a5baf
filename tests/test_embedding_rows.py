"""Used rows of embeddings sent in place of whole gradients: held to the contract, the same bits, fewer bytes."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from backends.bucket_settings import BucketSettings
from backends.capabilities import Place, UnsupportedError
from backends.embedding_rows import average, used_rows
from compare.report.traffic import needed_bytes
from records.checkpoint import checkpoint_path
from records.record import read_record
from tests.launching import lockstep, require_backend, train
from tests.sparing import in_ci

ROWS = ("--embedding-gradients", "rows")
BERT = ("--model", "bert-tiny", "--max-seq-length", "16", "--max-steps", "6", "--no-evaluate", "--save-every", "never")
BACKENDS = ("ddp", "accelerate", "fabric")
RESUMED: dict[str, tuple[str, ...]] = {"as it was": (), "whole again": ("--embedding-gradients", "whole")}
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
    run = read_record(tmp_path / "run" / "record.json")
    seen = run.ranks[0].diagnosis
    assert seen is not None
    assert needed_bytes(run) == sum(seen.reduced_bytes[-1].values()) < 0.3 * seen.gradient_bytes


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_sends_no_rows(tmp_path: Path, backend: str) -> None:
    require_backend(backend)
    record = train(backend, tmp_path / "run", *BERT, "--num-processes", "1", *ROWS)
    assert record["ranks"][0]["effective_settings"]["embedding_gradients"] == "whole"


def sha256_of_weights(run: Path) -> str:
    weights: str = json.loads((run / "record.json").read_text())["ranks"][0]["weights_sha256"]
    return weights


class _Bucket:
    """Two embeddings between other parameters."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.flat = torch.cat([torch.ones(5), first.flatten(), torch.ones(3), second.flatten()])
        ones, first_view, more, second_view = torch.split(self.flat, [5, first.numel(), 3, second.numel()])
        self.views = [ones, first_view.view_as(first), more, second_view.view_as(second)]
        self.owners = [torch.empty_like(view) for view in self.views]

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return self.views

    def parameters(self) -> list[torch.Tensor]:
        return self.owners


def _one_of_two_ranks(rank: int, meeting: Path) -> None:
    """Averages what uses other rows on each rank, then rows of one embedding alone, then none at all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for used, others in (([rank, 3], [2]), ([], [rank]), ([], [])):
        first, second = torch.zeros(4, 6), torch.zeros(3, 2)
        first[used], second[others] = rank + 1.0, rank + 1.0
        expected = _Bucket(first, second).flat
        dist.all_reduce(expected.div_(2))
        bucket = _Bucket(first, second)
        tables = {id(bucket.owners[place]) for place in (1, 3)}
        assert average(bucket, tables).wait() is bucket.flat
        assert bucket.flat.equal(expected)
    dist.destroy_process_group()


def test_a_step_may_use_some_rows_or_none(tmp_path: Path) -> None:
    ranks = [
        multiprocessing.get_context("fork").Process(target=_one_of_two_ranks, args=(rank, tmp_path / "meeting"))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]


def test_a_dry_run_knows_the_rows_of_one_rank(tmp_path: Path) -> None:
    options = ("--dry-run", "--num-processes", "2", "--model", "bert-tiny")
    whole, rows = (lockstep("ddp", *options, *more).stdout for more in ((), ROWS))
    assert re.search(r"sends +1\d\.\d MiB in a step", whole), whole
    assert re.search(r"sends +at least [123]\.\d MiB in a step", rows), rows


def test_a_run_goes_on_with_whole_gradients(tmp_path: Path) -> None:
    """And has the weights of a run that had them all along."""
    options = ("--task", "token-tagging", "--num-processes", "2", "--max-steps", "6", "--save-every", "3")
    train("ddp", tmp_path / "whole", *options)
    train("ddp", tmp_path / "rows", *options, *ROWS)
    checkpoint = checkpoint_path(tmp_path / "rows", 3)
    resumed = [train("ddp", tmp_path / name, "--resume", checkpoint, *more) for name, more in RESUMED.items()]
    settings = [one["ranks"][0]["effective_settings"].get("embedding_gradients") for one in resumed]
    assert settings == ["rows", None]
    assert len({sha256_of_weights(tmp_path / name) for name in ("whole", "rows", *RESUMED)}) == 1


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
