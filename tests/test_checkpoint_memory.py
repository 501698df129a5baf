"""That a checkpoint is in memory once while it is saved, and never as a whole in a rank that resumes."""

from __future__ import annotations

import pytest

from records.tensor_file import PIECE_BYTES
from tests.checkpoint_memory import measure
from tests.launching import lasting_directory

# The state is about 270 MiB, and a step computes little.
_SIZES = ("--model", "bert-small", "--vocab-size", "20000", "--max-seq-length", "32")

# What does not grow with the state: a piece of a tensor as it was read, as it is sent and as it was received, and as
# much again for what the allocator keeps.
_BESIDES = 4 * PIECE_BYTES


@pytest.mark.slow
def test_saving_and_resuming_take_little_more_than_the_state() -> None:
    """Between two steps, a rank holds the state; at the end of a backward pass also gradients, a third of the state.

    So a rank that copies the state twice takes at least 5/3 of the state more than one that only trains, even if the
    file is complete before the next step. One that reads the whole file while it holds a state takes 2/3 more.
    """
    with lasting_directory() as directory:
        state, (rank,) = measure("single", directory, *_SIZES, num_processes=1)
    assert state > 200 * 2**20
    assert 0.5 * state < rank.saves - rank.trains < 1.2 * state + _BESIDES
    # A fifth of all that training takes would be more, since the libraries have a large part in that.
    assert rank.resumes - rank.trains < 0.2 * state + _BESIDES
