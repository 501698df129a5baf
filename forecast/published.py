"""What the model says of published figures: ``python -m forecast.published`` prints the table of docs/forecast.md.

Publications seldom state all inputs. What is assumed here stands beside each figure, and a forecast is given as a range
where an input is not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from scipy.optimize import brentq

from forecast.algorithms import Algorithm, all_reduce
from forecast.model import Conditions, Work, step_time
from forecast.network import Link, Network, parse_network
from forecast.sending import Buckets, Fusion, Gradient, Whole

_BYTES = 4  # of a float32
# A backward pass computes two products of matrices for each one of the forward pass.
_BACKWARD = 2 / 3
_NUM_PARTS = 64

# Gibiansky 2017, "Bringing HPC techniques to deep learning" (Baidu), as in the author's own copy of the article,
# https://github.com/gibiansky/blog/blob/2f201eb064f4404d78474b37a1cc4e0bf330ce58/posts/baidu-allreduce/post.md:
# 300 million weights; 1 GB/s is supposed for a single reducer; 40 GPUs in 5 nodes, with 6 GB/s between nodes and 10
# within one, take 650 to 700 ms for a step that takes one GPU 370 ms. Each takes as many samples as the single one.
_BAIDU_BYTES = _BYTES * 300e6
_BAIDU_SUPPOSED = Network(Link(0.0, 1e9))
_BAIDU_NETWORK = Network(Link(0.0, 6e9), local=Link(0.0, 10e9))
_BAIDU_GPUS, _BAIDU_GPUS_OF_A_NODE = 40, 8
BAIDU_ONE_GPU_SECONDS = 0.37
BAIDU_SECONDS = (0.65, 0.70)
# https://www.tomshardware.com/news/baidu-svail-ring-allreduce-library,33691.html: 40 GPUs over one, of "an example
# neural network", which is taken to be the same.
BAIDU_TIMES = 31.0

# Sergeev and Del Balso 2018: 128 servers with 4 Pascal GPUs each, 25 Gbit/s RoCE, 64 images a GPU. Assumed: images/s of
# one P100 from TensorFlow's benchmarks of 2017 (of ResNet-101 between those of ResNet-50 and 152), weights in millions.
HOROVOD_SPEED = {"Inception V3": 142.0, "ResNet-101": 129.0, "VGG-16": 154.0}
HOROVOD_MILLIONS = {"Inception V3": 23.8, "ResNet-101": 44.5, "VGG-16": 138.4}
HOROVOD_EFFICIENCY = {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68}
_LATENCIES = ("5us", "20us")
# Horovod's defaults of that time.
_FUSION = Fusion(buffer_bytes=64 * 2**20, cycle_seconds=5e-3)

# Minutes of one training of BERT. Four GPUs are assumed, and a model of BERT-base's size.
BERT_MINUTES = {"one GPU": 4883.0, "spawn": 1459.0, "launch": 1464.0, "accelerate launch": 1400.0}
BERT_HOROVOD_MINUTES = 2203.0
BERT_APEX_MINUTES = 709.0
BERT_ACCUMULATED_MINUTES = 683.0  # in mixed precision
_BERT_GPUS = 4
_BERT_BYTES = _BYTES * 110e6
# A step of one GPU, whose length was not published. Only Horovod's cycle, which has a length of its own, depends on it.
_BERT_SECONDS = 1.0


class Row(NamedTuple):
    """A published figure: what it is, what was published, what the model says, and what has to be assumed."""

    figure: str
    published: str
    forecast: str
    remark: str


def even_work(seconds: float, num_bytes: float, num_parts: int = _NUM_PARTS) -> Work:
    """Returns a step whose gradients become ready evenly over the backward pass."""
    backward = _BACKWARD * seconds
    parts = range(1, num_parts + 1)
    gradients = tuple(Gradient(backward * part / num_parts, num_bytes / num_parts) for part in parts)
    return Work(seconds - backward, seconds - backward, backward, 0.0, gradients)


def all_reduce_seconds(algorithm: Algorithm, num_gpus: int) -> float:
    """Returns what an all-reduce of 300 million weights takes at 1 GB/s, without latency."""
    return all_reduce(algorithm, num_gpus, _BAIDU_SUPPOSED)(_BAIDU_BYTES)


def one_direction_seconds(num_gpus: int) -> float:
    """Returns what a single reducer needs to receive 300 million weights from all other GPUs at 1 GB/s."""
    return all_reduce_seconds("central", num_gpus) / 2


def baidu_step_seconds(one_gpu_seconds: float, *, overlaps: bool) -> float:
    """Returns what a step of Baidu's 40 GPUs takes with a ring.

    Args:
        one_gpu_seconds: What it takes one GPU.
        overlaps: Whether gradients are sent during the backward pass, in buckets, or all at once after it.
    """
    work = even_work(one_gpu_seconds, _BAIDU_BYTES)
    reduce = all_reduce("ring", _BAIDU_GPUS, _BAIDU_NETWORK, ranks_per_node=_BAIDU_GPUS_OF_A_NODE)
    return step_time(work, _BAIDU_GPUS, Buckets() if overlaps else Whole(), reduce, Conditions()).total


def baidu_speed_up(one_gpu_seconds: float, *, overlaps: bool) -> float:
    """Returns how many times as fast as one GPU Baidu's 40 GPUs are; see `baidu_step_seconds`."""
    return _BAIDU_GPUS * one_gpu_seconds / baidu_step_seconds(one_gpu_seconds, overlaps=overlaps)


def one_gpu_seconds_for(times: float, *, overlaps: bool) -> float:
    """Returns how long a step of one GPU must take so that Baidu's 40 GPUs are so many times as fast."""
    least, most = 1e-3, 1e3
    return float(brentq(lambda seconds: baidu_speed_up(seconds, overlaps=overlaps) - times, least, most))


def horovod_efficiency(model: str, latency: str, *, overlaps: bool) -> float:
    """Returns the efficiency of 512 GPUs with Horovod, with or without communication during the backward pass."""
    work = even_work(64 / HOROVOD_SPEED[model], _BYTES * 1e6 * HOROVOD_MILLIONS[model])
    network = parse_network(f"25gbit,latency={latency},local=80gbit,local-latency={latency}")
    reduce = all_reduce("ring", 512, network, ranks_per_node=4)
    return work.seconds / step_time(work, 512, _FUSION if overlaps else Whole(), reduce, Conditions()).total


def ddp_efficiency(latency: str) -> float:
    """Returns the efficiency of ResNet-50 on 256 GPUs with DDP.

    Assumed: 32 servers with 8 GPUs, 100 Gbit/s for each server alone, and 32 images in 0.1 s.
    """
    work = even_work(0.1, _BYTES * 25.6e6)
    network = parse_network(f"100gbit,latency={latency},local=1000gbit,local-latency={latency}")
    reduce = all_reduce("ring", 256, network, ranks_per_node=8)
    return work.seconds / step_time(work, 256, Buckets(), reduce, Conditions()).total


def bert_minutes() -> dict[str, float]:
    """Returns the minutes that follow for each way of sending from one row: the bandwidth is fitted to `spawn`."""
    alone = BERT_MINUTES["one GPU"] / _BERT_GPUS
    work = even_work(_BERT_SECONDS, _BERT_BYTES)

    def minutes(bandwidth: float, sending: Buckets | Fusion | Whole) -> float:
        reduce = all_reduce("ring", _BERT_GPUS, Network(Link(0.0, bandwidth)))
        return alone * step_time(work, _BERT_GPUS, sending, reduce, Conditions()).total / work.seconds

    least, most = 1e-3 * _BERT_BYTES, 1e3 * _BERT_BYTES
    bandwidth = float(brentq(lambda rate: minutes(rate, Buckets()) - BERT_MINUTES["spawn"], least, most))
    ways: dict[str, Buckets | Fusion | Whole] = {"buckets": Buckets(), "fusion": _FUSION, "whole": Whole()}
    return {way: minutes(bandwidth, sending) for way, sending in ways.items()}


def rows() -> Iterator[Row]:
    """Yields the table."""
    yield from _baidu_rows()
    for model, published in HOROVOD_EFFICIENCY.items():
        slow, fast = (100 * horovod_efficiency(model, latency, overlaps=True) for latency in reversed(_LATENCIES))
        whole = 100 * horovod_efficiency(model, _LATENCIES[0], overlaps=False)
        yield Row(
            f"Sergeev and Del Balso 2018: {model}, 512 GPUs",
            f"{100 * published:.0f} %",
            f"{slow:.0f} to {fast:.0f} %, without overlap {whole:.0f} %",
            f"latency is not stated: {_LATENCIES[0]} to {_LATENCIES[1]} are assumed, and the speed of one GPU",
        )
    low, high = (100 * ddp_efficiency(latency) for latency in reversed(_LATENCIES))
    yield Row(
        "Li et al. 2020: DDP, 256 GPUs",
        "near-linear",
        f"{low:.0f} to {high:.0f} %",
        "network and speed of one GPU are assumed; what other jobs on a shared network do to it is not in the model",
    )
    yield from _bert_rows()


def _baidu_rows() -> Iterator[Row]:
    source, num_gpus = "Gibiansky 2017 (Baidu)", _BAIDU_GPUS
    for number, seconds in ((2, "1.2"), (10, "10.8")):
        figure = f"{source}: a single reducer receives 300 million gradients at 1 GB/s, {number} GPUs"
        yield Row(figure, f"{seconds} s", f"{one_direction_seconds(number):.1f} s", "all inputs are stated")
    central, ring = all_reduce_seconds("central", num_gpus), all_reduce_seconds("ring", num_gpus)
    yield Row(
        f"{source}: an all-reduce of 300 million gradients at 1 GB/s, {num_gpus} GPUs",
        "no figure",
        f"{central:.1f} s through a single reducer, {ring:.2f} s in a ring",
        f"the model alone: without latency, their ratio is the number of GPUs ({central / ring:.0f})",
    )
    one, (least, most) = BAIDU_ONE_GPU_SECONDS, BAIDU_SECONDS
    steps = [baidu_step_seconds(one, overlaps=overlaps) for overlaps in (True, False)]
    yield Row(
        f"{source}: a step with a ring, 300 million weights, {num_gpus} GPUs",
        f"{1e3 * least:.0f} to {1e3 * most:.0f} ms",
        f"{1e3 * steps[0]:.0f} ms in buckets, {1e3 * steps[1]:.0f} ms without overlap",
        f"{1e3 * one:.0f} ms of one GPU and 6 GB/s between 5 nodes are stated; how much overlaps is not",
    )
    needed = [one_gpu_seconds_for(BAIDU_TIMES, overlaps=overlaps) for overlaps in (True, False)]
    yield Row(
        f"Tom's Hardware 2017 on {source}: the speed with a ring, {num_gpus} GPUs over one",
        f"{BAIDU_TIMES:.0f} times ({100 * BAIDU_TIMES / num_gpus:.0f} %)",
        f"{num_gpus * one / steps[0]:.1f} times in buckets, {num_gpus * one / steps[1]:.1f} without overlap",
        f"not reproduced: the published steps above are {num_gpus * one / most:.0f} to {num_gpus * one / least:.0f} "
        f"times; {BAIDU_TIMES:.0f} would follow if a step of one GPU took {needed[0]:.2f} s in buckets, "
        f"{needed[1]:.2f} s without overlap",
    )


def _bert_rows() -> Iterator[Row]:
    found, title = bert_minutes(), "BERT, 4 GPUs"
    for name, minutes in BERT_MINUTES.items():
        if name == "one GPU":
            yield Row("BERT, one GPU", f"{minutes:,.0f} min", "given", "the input")
        else:
            fitted = "the bandwidth is fitted to this row"
            same = "the row of spawn, by construction: all three send DDP's buckets"
            remark = fitted if name == "spawn" else same
            yield Row(f"{title}: {name}", f"{minutes:,.0f} min", f"{found['buckets']:,.0f} min", remark)
    yield Row(
        f"{title}: Horovod",
        f"{BERT_HOROVOD_MINUTES:,.0f} min",
        f"{found['fusion']:,.0f} min",
        f"not reproduced: Horovod's buffer and cycles; a step of {_BERT_SECONDS:g} s of one GPU is assumed",
    )
    yield Row(
        f"{title}: Horovod, sent as a whole",
        f"{BERT_HOROVOD_MINUTES:,.0f} min",
        f"{found['whole']:,.0f} min",
        "as if it hid nothing of its communication, which was not stated, but chosen since it fits",
    )
    yield Row(
        f"{title}: Apex",
        f"{BERT_APEX_MINUTES:,.0f} min",
        "none",
        "not reproduced: it computes in half precision, how fast was not stated",
    )
    yield Row(
        f"{title}: mixed precision with accumulation",
        f"{BERT_ACCUMULATED_MINUTES:,.0f} min",
        "none",
        "not reproduced: neither how fast it computes in half precision nor how many micro-steps it accumulates was "
        "stated",
    )


def table() -> str:
    """Returns the table in Markdown."""
    lines = ["| figure | published | the model | |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())])


if __name__ == "__main__":
    print(table())
