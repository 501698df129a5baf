"""Gradients averaged through shared memory: held to the contract, the same bits as through gloo, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backends.capabilities import Signs
from backends.shared_memory import SharedGradients
from tests.launching import lockstep, train
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


def _unconnected(rank: int, *, inbox: int = -1, outboxes: tuple[int, ...] = ()) -> SharedGradients:
    """One of 1024 ranks that waits for the signal of the rank 1000 alone."""
    own = SharedGradients.__new__(SharedGradients)
    own._rank, own._world_size, own._timeout_seconds = rank, 1024, 5
    own._inbox, own._outboxes = inbox, list(outboxes)
    own._signals = [int(other != 1000) for other in range(1024)]
    own._num_sent = 0
    return own


def test_a_signal_names_any_rank_of_a_node_and_no_more_come_from_those_that_have_ended() -> None:
    inbox, outbox = os.pipe()
    waiting = _unconnected(0, inbox=inbox)
    sending = _unconnected(1000, outboxes=(outbox,))
    sending._signals = [1] * 1024
    sending._meet()
    waiting._meet()
    assert waiting._signals == [1] * 1024
    os.close(outbox)
    with pytest.raises(ConnectionResetError) as error:
        waiting._meet()
    os.close(inbox)
    assert shows_lost_peer(str(error.value), Signs())


@pytest.mark.parametrize(
    ("options", "where"), [(("--num-nodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"), "2 nodes")]
)
def test_it_is_refused_where_ranks_share_no_memory(options: tuple[str, ...], where: str, tmp_path: Path) -> None:
    done = lockstep("ddp", *SHARED, *options, "--output-dir", tmp_path / "run")
    assert done.returncode == 2
    assert f"--transport shared-memory is for ranks that compute on the CPUs of one node, not on {where}" in done.stderr
    assert not (tmp_path / "run").exists()
