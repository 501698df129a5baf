"""The tiny task, where it is sent to workers that load data."""

from __future__ import annotations

import pickle

import torch

from tasks.token_tagging import TokenTagging, TokenTaggingSettings


def test_a_worker_draws_the_samples_again_and_the_same() -> None:
    """What is sent to it does not grow with the number of samples."""
    task = TokenTagging(TokenTaggingSettings(num_train_samples=2000))
    expected = task.collate("train", range(2000)).tensors
    sent = pickle.dumps(task)
    assert len(sent) < 2000
    received = pickle.loads(sent).collate("train", range(2000)).tensors
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
