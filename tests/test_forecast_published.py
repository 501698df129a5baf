"""What the model says of published figures, against what follows from their inputs by hand."""

from __future__ import annotations

import pytest

from forecast import published
from launch.starters.interface import PROJECT_DIRECTORY


def test_published_figures_that_can_be_computed() -> None:
    assert published.one_direction_seconds(2) == pytest.approx(1.2)
    assert published.one_direction_seconds(10) == pytest.approx(10.8)
    for model, efficiency in published.HOROVOD_EFFICIENCY.items():
        ends = [published.horovod_efficiency(model, latency, overlaps=True) for latency in ("20us", "5us")]
        assert ends[0] - 0.01 <= efficiency <= ends[1] + 0.01, model
    assert published.ddp_efficiency("5us") > 0.9


def test_a_single_reducer_takes_as_many_times_as_long_as_a_ring_as_there_are_gpus() -> None:
    """1.2 GB at 1 GB/s: 39 GPUs send and receive all of it, or each sends 78 messages of a fortieth."""
    assert published.all_reduce_seconds("central", 40) == pytest.approx(2 * 39 * 1.2)
    assert published.all_reduce_seconds("ring", 40) == pytest.approx(2 * 39 * 1.2 / 40)


def test_the_published_step_of_a_ring_lies_between_full_overlap_and_none() -> None:
    """An all-reduce takes 390 ms at 6 GB/s.

    After a backward pass, all of it comes on top of the 370 ms. In buckets, it has hardly a gap: of 64 gradients, one
    is sent alone when it is ready, the next ones in pairs, of which the first is ready with the third gradient.
    """
    reduce, backward = 2 * 39 / 40 * 1.2 / 6, 0.37 * 2 / 3
    assert published.baidu_step_seconds(0.37, overlaps=False) == pytest.approx(0.37 + reduce)
    finished = backward * 3 / 64 + reduce * 63 / 64
    in_buckets = published.baidu_step_seconds(0.37, overlaps=True)
    assert in_buckets == pytest.approx(0.37 - backward + finished)
    least, most = published.BAIDU_SECONDS
    assert in_buckets < least < most < 0.37 + reduce


def test_which_step_gives_the_published_speed_of_40_gpus() -> None:
    """Without overlap, 40 / 31 of the step of one GPU are that step and 390 ms."""
    times = published.BAIDU_TIMES
    assert published.one_gpu_seconds_for(times, overlaps=False) == pytest.approx(0.39 / (40 / times - 1))
    for overlaps in (False, True):
        seconds = published.one_gpu_seconds_for(times, overlaps=overlaps)
        assert published.baidu_speed_up(seconds, overlaps=overlaps) == pytest.approx(times)
        assert seconds > published.BAIDU_ONE_GPU_SECONDS


def test_what_one_row_of_the_published_comparison_says_of_the_others() -> None:
    """One bandwidth is fitted to one row of DDP, which the others are close to.

    Horovod's is far from what its own way of sending gives, and close to what it would be if it hid nothing.
    """
    found = published.bert_minutes()
    assert found["buckets"] == pytest.approx(published.BERT_MINUTES["spawn"])
    for name in ("launch", "accelerate launch"):
        assert found["buckets"] == pytest.approx(published.BERT_MINUTES[name], rel=0.05), name
    assert found["whole"] == pytest.approx(published.BERT_HOROVOD_MINUTES, rel=0.05)
    # While a gradient is sent, a cycle ends and the next gradient becomes ready: only the first one is waited for.
    alone = published.BERT_MINUTES["one GPU"] / 4
    reduce = found["whole"] / alone - 1
    assert found["fusion"] == pytest.approx(alone * (1 / 3 + 2 / 3 / 64 + reduce))
    assert found["fusion"] < 0.7 * published.BERT_HOROVOD_MINUTES


def test_the_table_of_the_page_is_generated() -> None:
    assert published.table() in (PROJECT_DIRECTORY / "docs" / "forecast.md").read_text()
