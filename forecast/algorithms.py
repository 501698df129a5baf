"""What an all-reduce of S bytes over N ranks takes, by algorithm, in the alpha-beta model (Hockney 1994).

A message of S bytes takes alpha + S / beta, a node sends and receives at once, and a sum is as fast as its messages.
Networks do not block: each pair of nodes has the bandwidth to itself.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from forecast.network import Link, Network

Algorithm = Literal["ring", "tree", "hierarchical", "central"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
AllReduce = Callable[[float], float]
"""Returns the seconds that an all-reduce of so many bytes takes."""


def measured_all_reduce(times: Sequence[tuple[float, float]]) -> AllReduce:
    """Returns what all-reduces take that were measured at several sizes: straight lines between these.

    Beyond the largest size, the line through the last two goes on; below the smallest, it takes as long as that. More
    bytes never take less time: a size that took less than a smaller one, by chance, counts as if it had taken as long,
    and the line goes on from the last size that took less.

    Args:
        times: Sizes in bytes and seconds, two at least, in the order of size.
    """
    sizes = [size for size, _ in times]
    seconds = list(itertools.accumulate((second for _, second in times), max))

    def taken(num_bytes: float) -> float:
        if num_bytes <= sizes[0]:
            return float(seconds[0])
        after = bisect.bisect_left(sizes, num_bytes)
        before = after - 1
        if after == len(sizes):
            after, before = after - 1, max(0, bisect.bisect_left(seconds, seconds[-1]) - 1)
        slope = (seconds[after] - seconds[before]) / (sizes[after] - sizes[before])
        return float(seconds[before] + slope * (num_bytes - sizes[before]))

    return taken


def all_reduce(algorithm: Algorithm, num_ranks: int, network: Network, *, ranks_per_node: int = 1) -> AllReduce:
    """Returns what all-reduces take.

    Args:
        algorithm: How the ranks reduce.
        num_ranks: The number of ranks: fewer than `ranks_per_node`, or a multiple of it.
        network: What connects them.
        ranks_per_node: How many ranks a node has; they share the link of the node.
    """
    local = network.local or network.link
    spans_nodes = num_ranks > ranks_per_node
    if not spans_nodes:
        # Ranks of one node: no message leaves it.
        formulas = {"tree": _tree, "central": _central}
        formula = formulas.get(algorithm, _ring)
        return lambda num_bytes: formula(num_ranks, num_bytes, local)
    if algorithm == "ring":
        # NCCL and Horovod lay the ring so that it enters and leaves each node once.
        slowest = network.link if ranks_per_node == 1 else _slower(network.link, local)
        return lambda num_bytes: _ring(num_ranks, num_bytes, slowest)
    if algorithm == "hierarchical":
        num_nodes = num_ranks // ranks_per_node
        return lambda num_bytes: (_ring(ranks_per_node, num_bytes, local) + _ring(num_nodes, num_bytes, network.link))
    # The ranks of a node send at the same time, through one link.
    shared = Link(network.link.latency, network.link.bandwidth / ranks_per_node)
    if algorithm == "tree":
        return lambda num_bytes: _tree(num_ranks, num_bytes, shared)
    return lambda num_bytes: _central(num_ranks, num_bytes, network.link)


def _slower(first: Link, second: Link) -> Link:
    return Link(max(first.latency, second.latency), min(first.bandwidth, second.bandwidth))


def _ring(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Reduce-scatter and all-gather along a ring: 2 (N-1) messages of S/N bytes each, one after the other.

    No algorithm sends fewer bytes (Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002; for training:
    Gibiansky 2017, "Bringing HPC techniques to deep learning"). gloo's and Horovod's default; NCCL's for large sizes.

    Both halves within a node and the ring between the nodes make the hierarchical all-reduce of Horovod:
    reduce-scatter among the K ranks of a node, an all-reduce of S/K bytes by each of them between M nodes, which
    together is one of S bytes through the link of the node, and all-gather in the node.
    """
    return 2 * (num_ranks - 1) * (link.latency + num_bytes / num_ranks / link.bandwidth)


def _tree(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Rabenseifner's algorithm: reduce-scatter by recursive halving, all-gather by recursive doubling.

    2 log2(N) messages that carry 2 (N-1)/N S bytes. Where N is no power of two, ranks that are too many send all of
    theirs to another one first, and receive the result last (Thakur, Rabenseifner and Gropp 2005, section 4.5,
    https://doi.org/10.1177/1094342005051521).
    """
    if num_ranks == 1:
        return 0.0
    rounds = num_ranks.bit_length() - 1
    power = 1 << rounds
    seconds = 2 * (rounds * link.latency + (power - 1) / power * num_bytes / link.bandwidth)
    return seconds if power == num_ranks else seconds + 2 * (link.latency + num_bytes / link.bandwidth)


def _central(num_ranks: int, num_bytes: float, link: Link) -> float:
    """One rank receives the gradients of all others through its link, adds them up, and sends the sum to each.

    So do nn.DataParallel and a single parameter server (Li et al. 2014, OSDI). It sends and receives one message at a
    time, so that the time grows with N.
    """
    if num_ranks == 1:
        return 0.0
    return 2 * (num_ranks - 1) * (link.latency + num_bytes / link.bandwidth)
