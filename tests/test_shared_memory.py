"""Gradients averaged through shared memory: held to the contract, the same bits as through gloo, what is refused."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from backends.capabilities import Signs
from backends.shared_memory import SharedGradients
from tests.launching import lockstep, train, wait_until
from tests.sparing import in_ci
from watch.failures import shows_lost_peer

SHARED = ("--transport", "shared-memory")
OPTIONS = ("--task", "token-tagging", "--dtype", "float32", "--max-steps", "8", "--threads-per-rank", "1")
# Gradients, weights, bits, traffic, overflow, unused parameters, and a rank that ends or hangs.
CLAUSES = "C09,C16,C17,C24,C25,C26,C27,C28,C30,C37,C38,C43"


@pytest.mark.slow
@pytest.mark.parametrize("numbers_of_ranks", in_ci(["2"], ["2", "1,3,4"]))
def test_it_keeps_the_contract(numbers_of_ranks: str) -> None:
    done = lockstep("contract", "ddp", *SHARED, "--num-processes", numbers_of_ranks, "--check", CLAUSES)
    assert done.returncode == 0, done.stdout + done.stderr
    num_passed = 12 if numbers_of_ranks == "2" else 11  # C24 is about the bits of two ranks
    assert f"ddp --transport shared-memory on cpu: {num_passed} passed" in done.stdout


def test_two_ranks_get_the_bits_of_gloo(tmp_path: Path) -> None:
    options = (*OPTIONS, "--num-processes", "2", "--micro-batch-size", "8")
    own = train("ddp", tmp_path / "own", *options, *SHARED)
    other = train("ddp", tmp_path / "other", *options)
    assert own["ranks"][0]["weights_sha256"] == other["ranks"][0]["weights_sha256"]
    assert own["ranks"][0]["effective_settings"]["transport"] == "shared memory"
    assert other["ranks"][0]["effective_settings"]["transport"] == "gloo"


def test_four_ranks_agree_to_the_bit_in_small_buckets(tmp_path: Path) -> None:
    options = ("--num-processes", "4", "--model", "bert-mini", "--max-steps", "4", "--bucket-cap-mb", "1")
    record = train("ddp", tmp_path / "run", *options, *SHARED, "--max-seq-length", "16", "--diagnose")
    assert len({rank["weights_sha256"] for rank in record["ranks"]}) == 1
    assert record["ranks"][0]["diagnosis"]["num_reductions"][-1] > 3


class _Bucket:
    """A bucket of one step; DDP keeps its buffer from step to step."""

    def __init__(self, buffer: torch.Tensor, *, is_last: bool) -> None:
        self._buffer, self._is_last = buffer, is_last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return self._is_last


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _one_of_three_ranks(rank: int, meeting: Path) -> None:
    """Averages 20 buckets, one of them empty, twice; then rank 2 ends, which the others find out at once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=3)
    gradients = SharedGradients(most_buckets=20, timeout_seconds=30)
    before = _open_files()
    buckets = [_Bucket(torch.zeros(50_000 * (number != 7)), is_last=number == 19) for number in range(20)]
    for step in range(2):
        for bucket in buckets:
            bucket.buffer().fill_(rank + step)
        averaged = [gradients.average(bucket) for bucket in buckets]
        for bucket, average in zip(buckets, averaged, strict=True):
            assert average.value().data_ptr() == bucket.buffer().data_ptr()
            torch.testing.assert_close(bucket.buffer(), torch.full_like(bucket.buffer(), 1.0 + step))
    assert _open_files() <= before + 20  # those of its own buckets: no more, whatever the number of ranks
    if rank < 2:
        with pytest.raises(ConnectionResetError, match="rank 2 has ended") as error:
            gradients.average(_Bucket(torch.zeros(1), is_last=True))
        assert shows_lost_peer(str(error.value), Signs())
        meeting.with_name(f"rank {rank} knows").touch()
        wait_until(meeting.with_name(f"rank {1 - rank} knows").exists, "the other survivor")
    os._exit(0)  # without a word to the others


def test_ranks_keep_no_file_of_others_open_and_name_one_that_has_ended(tmp_path: Path) -> None:
    ranks = [
        multiprocessing.get_context("fork").Process(target=_one_of_three_ranks, args=(rank, tmp_path / "meeting"))
        for rank in range(3)
    ]
    begun = time.monotonic()
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0, 0]
    assert time.monotonic() - begun < 25, "they waited until the timeout"


def test_a_signal_names_any_rank_of_a_node_and_none_can_be_sent_to_one_that_has_ended() -> None:
    inbox, outbox = os.pipe()
    waiting, sending = (SharedGradients.__new__(SharedGradients) for _ in range(2))
    for rank, one in ((0, waiting), (1000, sending)):
        one._rank, one._world_size, one._timeout_seconds, one._num_sent = rank, 1024, 5, 0
        one._inbox, one._outboxes = inbox, {}
        one._signals = [int(other != 1000) for other in range(1024)]
    sending._outboxes = {0: outbox}
    sending._meet()
    waiting._meet()
    assert waiting._signals == [1] * 1024
    os.close(inbox)
    with pytest.raises(ConnectionResetError, match="rank 0 has ended"):
        sending._meet()
    os.close(outbox)


@pytest.mark.parametrize(
    ("options", "where"), [(("--num-nodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"), "2 nodes")]
)
def test_it_is_refused_where_ranks_share_no_memory(options: tuple[str, ...], where: str, tmp_path: Path) -> None:
    done = lockstep("ddp", *SHARED, *options, "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert f"--transport shared-memory is for ranks that compute on the CPUs of one node, not on {where}" in done.stderr
    assert not (tmp_path / "run").exists()
