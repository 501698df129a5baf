"""The model of a forecast: its formulas against cases computed by hand, and at their limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.results import Interval
from forecast.algorithms import ALGORITHMS, Algorithm, all_reduce, measured_all_reduce
from forecast.measuring import parts_of, quartile_spread, ratio
from forecast.model import Conditions, Work, step_time
from forecast.network import Link, Network, parse_network
from forecast.profile import Computing
from forecast.scenario import End, NotMeasured, Scenario, Variant, link_of
from forecast.sending import WAYS, Buckets, Fusion, Gradient, Whole, sending_of
from forecast.times import RankTimes
from tests.forecasting import certain, collective, made_profile

LINK = Network(Link(0.001, 1e9))  # 1 ms, 1 GB/s
MEGABYTE = 1e6
WORK = Work(0.03, 0.03, 0.06, 0.01, tuple(Gradient(0.015 * k, MEGABYTE) for k in range(1, 5)))


@pytest.mark.parametrize(
    ("algorithm", "num_ranks", "ranks_per_node", "milliseconds"),
    [
        ("ring", 2, 1, 2 * (1 + 0.5)),
        ("ring", 4, 1, 6 * (1 + 0.25)),
        ("tree", 4, 1, 2 * (2 * 1 + 0.75)),
        ("tree", 8, 1, 2 * (3 * 1 + 0.875)),
        ("tree", 6, 1, 2 * (2 * 1 + 0.75) + 2 * (1 + 1)),
        ("central", 4, 1, 6 * (1 + 1)),
        ("hierarchical", 4, 1, 6 * (1 + 0.25)),
        ("hierarchical", 8, 4, 6 * (1 + 0.25) + 2 * (1 + 0.5)),
        ("ring", 8, 4, 14 * (1 + 0.125)),
        ("tree", 8, 4, 2 * (3 * 1 + 4 * 0.875)),
    ],
)
def test_an_all_reduce_of_a_megabyte(
    algorithm: Algorithm, num_ranks: int, ranks_per_node: int, milliseconds: float
) -> None:
    seconds = all_reduce(algorithm, num_ranks, LINK, ranks_per_node=ranks_per_node)(MEGABYTE)
    assert seconds == pytest.approx(1e-3 * milliseconds)


def test_ranks_of_one_node_use_its_own_links() -> None:
    network = Network(Link(1.0, 1.0), local=Link(0.001, 1e9))
    for algorithm in ALGORITHMS:
        alike = all_reduce(algorithm, 4, LINK)(MEGABYTE)
        assert all_reduce(algorithm, 4, network, ranks_per_node=4)(MEGABYTE) == pytest.approx(alike)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_sends_nothing_and_an_infinite_network_takes_nothing(algorithm: Algorithm) -> None:
    assert all_reduce(algorithm, 1, LINK)(MEGABYTE) == 0
    assert all_reduce(algorithm, 8, Network(Link(0.0, math.inf)))(MEGABYTE) == 0


def test_buckets_are_sent_one_after_the_other() -> None:
    """Four buckets of 20 ms each, ready every 15 ms: the first begins at 15 ms, and then one waits for the other."""
    buckets = Buckets(first_bytes=1_000_000, bucket_bytes=1_000_000)
    assert buckets.finish(WORK.gradients, 0.06, lambda _: 0.02) == pytest.approx(0.015 + 4 * 0.02)
    step = step_time(WORK, 2, buckets, lambda _: 0.02, Conditions())
    assert step.exposed == pytest.approx(0.095 - 0.06)
    assert step.total == pytest.approx(0.1 + 0.035)
    # What is fast enough is hidden, but for the last bucket.
    assert step_time(WORK, 2, buckets, lambda _: 0.005, Conditions()).exposed == pytest.approx(0.005)


def test_a_bucket_is_full_at_its_limit_or_beyond() -> None:
    sent: list[float] = []
    gradients = [Gradient(0.0, size) for size in (6, 6, 30, 1, 1)]
    Buckets(first_bytes=10, bucket_bytes=20).finish(gradients, 1.0, lambda size: sent.append(size) or 0.0)
    assert sent == [12, 30, 2]


def test_a_fusion_buffer_sends_in_cycles_what_is_ready() -> None:
    """A cycle of 20 ms: a gradient of 15 ms, then those of 30, 45 and 60 ms once the first has been sent at 60 ms."""
    sent: list[float] = []

    def reduce(size: float) -> float:
        sent.append(size)
        return 0.04 if size else 0.0

    fusion = Fusion(buffer_bytes=2_000_000, cycle_seconds=0.02)
    # At 20 ms one gradient goes, until 60 ms, and then the other three, of which two fit into a buffer.
    assert fusion.finish(WORK.gradients, 0.06, reduce) == pytest.approx(0.06 + 2 * 0.04)
    assert [size for size in sent if size] == [MEGABYTE, 2 * MEGABYTE, MEGABYTE]


def test_twice_the_micro_steps_take_twice_the_time_before_the_update() -> None:
    work = Work(before=0.36, micro_step=0.1, backward=0.04, update=0.01, gradients=(), micro_steps=4)
    assert work.accumulated(2).seconds == pytest.approx(2 * 0.4 + 0.01)
    assert work.accumulated(2).micro_steps == 8


def test_a_bucket_is_compressed_when_it_is_full() -> None:
    sent: list[float] = []

    def reduce(size: float) -> float:
        sent.append(size)
        return 0.0

    buckets, fusion = Buckets(first_bytes=2_000_000, bucket_bytes=2_000_000), Fusion(buffer_bytes=2_000_000)
    step_time(WORK.compressed(0.5), 2, buckets, reduce, Conditions())
    assert sent == [MEGABYTE, MEGABYTE]
    sent.clear()
    step_time(WORK.compressed(0.5), 2, fusion, reduce, Conditions())
    assert sum(sent) == 2 * MEGABYTE
    assert max(sent) <= 2 * MEGABYTE


def test_what_is_sent_as_a_whole_hides_nothing() -> None:
    step = step_time(WORK, 4, Whole(), all_reduce("ring", 4, LINK), Conditions(overlap_slow_down=2.0))
    assert step.exposed == pytest.approx(6 * (0.001 + 0.001))
    assert step.computing == pytest.approx(0.1)  # nothing is sent while the backward pass runs


def test_what_other_ranks_change() -> None:
    conditions = Conditions(slow_down=2.0, overlap_slow_down=1.5, spread=0.001)
    step = step_time(WORK, 8, Buckets(), lambda _: 0.0, conditions)
    assert step.computing == pytest.approx(2 * (0.03 + 1.5 * 0.06 + 0.01))
    assert step.waiting == pytest.approx(0.001 * math.sqrt(2 * math.log(8)))
    alone = step_time(WORK, 1, Buckets(), lambda _: 1.0, conditions)
    assert (alone.total, alone.exposed, alone.waiting) == (pytest.approx(0.1), 0.0, 0.0)


@given(
    st.sampled_from(ALGORITHMS),
    st.sampled_from(["buckets", "whole"]),  # a cycle of a fusion buffer that begins later may send more at once
    st.integers(2, 512),
    st.floats(0, 0.01),
    st.floats(1e6, 1e11),
    st.floats(1.1, 10),
)
def test_a_better_network_never_makes_a_step_longer(
    algorithm: Algorithm, way: str, ranks: int, latency: float, bandwidth: float, factor: float
) -> None:
    sending = WAYS[way]  # type: ignore[index]
    slow = Network(Link(latency * factor, bandwidth / factor))
    times = [
        step_time(WORK, ranks, sending, all_reduce(algorithm, ranks, network), Conditions()).total
        for network in (Network(Link(latency, bandwidth)), slow)
    ]
    assert WORK.seconds <= times[0] * (1 + 1e-9)
    assert times[0] <= times[1] * (1 + 1e-9)


@given(st.integers(2, 256), st.sampled_from(["ring", "central", "hierarchical"]))
def test_more_ranks_never_make_a_step_shorter(ranks: int, algorithm: Algorithm) -> None:
    fewer, more = (
        step_time(WORK, number, Buckets(), all_reduce(algorithm, number, LINK), Conditions(spread=1e-4)).total
        for number in (ranks, ranks + 1)
    )
    assert fewer <= more


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("25gbit", Network(Link(0.0, 25e9 / 8))),
        ("25Gbit, latency=20us", Network(Link(20e-6, 25e9 / 8))),
        ("1.5mbit,latency=2ms", Network(Link(2e-3, 1.5e6 / 8))),
        ("1tbit,latency=1s", Network(Link(1.0, 1e12 / 8))),
        ("10gbit,local=200gbit,local-latency=500ns", Network(Link(0.0, 1.25e9), Link(500e-9, 25e9))),
    ],
)
def test_networks_that_are_understood(text: str, network: Network) -> None:
    found = parse_network(text)
    for link, expected in ((found.link, network.link), (found.local or found.link, network.local or network.link)):
        assert (link.latency, link.bandwidth) == pytest.approx((expected.latency, expected.bandwidth))
    assert parse_network(found.text).text == found.text


@pytest.mark.parametrize(
    "text",
    [
        *("", "25", "0gbit", "-1gbit", "25gigabit", "25GB", "nan gbit", "1e9gbit", "9" * 400 + "gbit", "25gbit,"),
        *("25gbit,latency=-1us", "25gbit,latency=20", "25gbit,latency=20h", "25gbit,latency=99s"),
        *("25gbit,delay=2us", "25gbit,latency", "25gbit,latency=1us,latency=2us", "25gbit,local-latency=1us"),
        "latency=20us",
    ],
)
def test_networks_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|give it once"):
        parse_network(text)


def test_how_a_backend_sends_is_read_from_its_settings() -> None:
    default = {"bucket_bytes": 25 * 2**20, "transport": "gloo"}
    assert sending_of(default, {"bucket_cap_mb": None}) == Buckets(first_bytes=2**20, bucket_bytes=25 * 2**20)
    assert sending_of(default, {"bucket_cap_mb": 25}) == Buckets(first_bytes=25 * 2**20, bucket_bytes=25 * 2**20)
    fusion = {"fusion_threshold_bytes": 1024, "cycle_time_ms": 0.5}
    assert sending_of(fusion, {}) == Fusion(buffer_bytes=1024, cycle_seconds=0.0005)
    apex = {"message_size_elements": 100, "delay_allreduce": False}
    assert sending_of(apex, {}) == Buckets(first_bytes=400, bucket_bytes=400)
    assert sending_of({**apex, "delay_allreduce": True}, {}) == sending_of({}, {}) == Whole()


def test_a_measured_all_reduce_gives_the_link_of_a_ring() -> None:
    """What the ring takes on that link is the line that was measured."""
    for ranks in (2, 5):
        link = link_of(collective(ranks, latency=0.004, bandwidth=5e8))
        assert all_reduce("ring", ranks, Network(link))(MEGABYTE) == pytest.approx(0.004 + MEGABYTE / 5e8)


def test_the_library_adds_its_latency_and_may_be_slower_than_the_network() -> None:
    profile = made_profile(collectives=[collective(2, latency=0.002, bandwidth=1e8)])
    variant, network = Variant("ring", Whole()), Network(Link(0.001, 1e12))
    step = Scenario(profile, network).step(variant, 2)
    assert step.exposed == pytest.approx(2 * (0.001 + 0.001) + 4e6 / 1e8)
    # What was measured on the network itself needs neither.
    measured = Scenario(profile, network, measured=(collective(2, latency=0.003, bandwidth=1e9),)).step(variant, 2)
    assert measured.exposed == pytest.approx(0.003 + 4e6 / 1e9)


def test_between_measured_sizes_lines_are_straight() -> None:
    taken = measured_all_reduce([(1e6, 0.002), (2e6, 0.003), (4e6, 0.009)])
    sizes = [0.0, 1e6, 1.5e6, 2e6, 3e6, 4e6, 5e6]
    assert [taken(size) for size in sizes] == pytest.approx([0.002, 0.002, 0.0025, 0.003, 0.006, 0.009, 0.012])


def test_more_bytes_never_take_less_time() -> None:
    """Whatever was measured by chance, and beyond the largest size, too."""
    taken = measured_all_reduce([(1e6, 0.002), (2e6, 0.006), (4e6, 0.005)])
    assert [taken(size) for size in (2e6, 3e6, 4e6)] == pytest.approx([0.006, 0.006, 0.006])
    assert taken(7e6) == pytest.approx(0.006 + 3e6 * 0.004 / 3e6)  # as from the last size that took less


def test_all_reduces_of_so_many_ranks_are_taken_as_they_were_measured() -> None:
    """4 MB as a whole, over 2 ranks where they took 20 ms; over 4 ranks, the line of 2 ranks says how long."""
    measured = collective(2, latency=0.001, bandwidth=1e9, times=((1e6, 0.005), (4e6, 0.020), (16e6, 0.1)))
    scenario, variant = (
        Scenario(made_profile(), Network(Link(0.0, 1e9)), measured=(measured,)),
        Variant("ring", Whole()),
    )
    assert scenario.step(variant, 2).exposed == pytest.approx(0.020)
    assert scenario.step(variant, 4).exposed == pytest.approx(all_reduce("ring", 4, Network(link_of(measured)))(4e6))


def test_what_the_model_lacks_is_seen_on_the_profiled_machine() -> None:
    """Two ranks took 125 ms there, where the model says 100 and 5 for an all-reduce: 20 ms are added on a network."""
    profile = made_profile(
        sending=Whole(),
        computing=[Computing(num_processes=n, step_seconds=certain(0.1), spread_seconds=0.0) for n in (1, 2)],
        collectives=[collective(2, latency=0.001, bandwidth=1e9, times=((1e6, 0.002), (4e6, 0.005)))],
        together=[Computing(num_processes=2, step_seconds=certain(0.125), spread_seconds=0.0)],
    )
    variant, network = Variant("ring", Whole()), Network(Link(0.0, 1e9))
    measured = (collective(2, latency=0.010, bandwidth=1e8),)
    here, elsewhere = (Scenario(profile, network, measured=measured, same_machine=same) for same in (True, False))
    step = here.step(variant, 2)
    assert (step.exposed, step.remainder, step.total) == pytest.approx((0.050, 0.020, 0.170))
    assert elsewhere.step(variant, 2).total == pytest.approx(0.150)  # machines of their own do not share cores
    assert here.step(variant, 1).total == pytest.approx(0.1)
    assert any("beyond the model (+20 ms for 2)" in line for line in here.remarks)
    # The errors of all-reduces here and there do not cancel: 4 to 6 ms, and 40 to 60 ms.
    uncertain = [
        found.model_copy(
            update={"times": [], "bytes_per_second": Interval(estimate=rate, low=rate / 1.2, high=rate / 0.8)}
        )
        for found, rate in (
            (collective(2, latency=0.0, bandwidth=0.8e9), 0.8e9),
            (collective(2, latency=0.0, bandwidth=0.8e8), 0.8e8),
        )
    ]
    scenario = Scenario(
        profile.model_copy(update={"collectives": uncertain[:1]}), network, measured=(uncertain[1],), same_machine=True
    )
    whole = scenario.step_interval(variant, 2)
    assert (whole.low, whole.estimate, whole.high) == pytest.approx((0.159, 0.170, 0.181))
    # Where ranks took less than the model says, no more is taken off than communication.
    faster = profile.model_copy(
        update={"together": [Computing(num_processes=2, step_seconds=certain(0.01), spread_seconds=0.0)]}
    )
    assert Scenario(faster, network, measured=measured, same_machine=True).step(variant, 2).total == pytest.approx(0.1)


def test_a_stated_network_is_said_to_have_no_interval() -> None:
    remarks = Scenario(made_profile(), parse_network("1gbit")).remarks
    assert any("no interval covers what a network falls short of it" in line for line in remarks)


def test_another_algorithm_is_as_much_slower_than_what_was_measured_as_the_model_says() -> None:
    measured = collective(4, latency=0.002, bandwidth=1e9, times=((1e6, 0.01), (4e6, 0.1)))
    scenario = Scenario(made_profile(), Network(Link(0.0, 2e9)), measured=(measured,))
    link = Network(link_of(measured))
    ring, central = (all_reduce(name, 4, link)(4e6) for name in ("ring", "central"))
    found = scenario.step(Variant("central", Whole()), 4).exposed
    assert found == pytest.approx(0.1 * central / ring)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ranks_agree_through_any_algorithm_on_a_line_without_latency(algorithm: Algorithm) -> None:
    """Horovod's agreement has no bytes; the low end of the line has no limit at all."""
    measured = collective(4, latency=0.0, bandwidth=1e9, times=((1e6, 0.01), (4e6, 0.1)))
    endless = Interval(estimate=1e9, low=1e9, high=None)
    scenario = Scenario(made_profile(), LINK, measured=(measured.model_copy(update={"bytes_per_second": endless}),))
    step = scenario.step_interval(Variant(algorithm, Fusion()), 4)
    assert step.low is not None
    assert step.low > 0.1


def test_a_burst_that_passes_fast_makes_no_link_faster_than_it_is() -> None:
    measured = collective(2, latency=0.0, bandwidth=2e9)  # a line through small sizes, on a network of 1 GB/s
    scenario = Scenario(made_profile(), Network(Link(0.0, 1e9)), measured=(measured,))
    assert scenario.step(Variant("ring", Whole()), 4).exposed == pytest.approx(1.5 * 4e6 / 1e9)


def test_ranks_that_share_a_machine_compute_as_slowly_as_processes_did() -> None:
    computing = [
        Computing(num_processes=1, step_seconds=certain(0.1), spread_seconds=None),
        Computing(num_processes=4, step_seconds=certain(0.25), spread_seconds=0.001),
    ]
    profile, network, variant = (
        made_profile(computing=computing),
        Network(Link(0.0, math.inf)),
        Variant("ring", Whole()),
    )
    shared = Scenario(profile, network, same_machine=True)
    assert shared.step(variant, 4).computing == pytest.approx(0.25)
    with pytest.raises(NotMeasured, match="--processes 2"):
        shared.step(variant, 2)
    # On nodes of their own, they compute as one does; on nodes of four, as four do.
    assert Scenario(profile, network).step(variant, 4).computing == pytest.approx(0.1)
    assert Scenario(profile, network, ranks_per_node=4).step(variant, 8).computing == pytest.approx(0.25)
    assert Scenario(profile, network, slow_down=3.0).step(variant, 8).computing == pytest.approx(0.3)


def test_ranks_differ_as_much_as_processes_that_shared_a_machine_as_they_do() -> None:
    spreads = {1: None, 2: 0.001, 4: 0.005, 8: 0.020}
    profile = made_profile(
        computing=[
            Computing(num_processes=number, step_seconds=certain(0.1), spread_seconds=spread)
            for number, spread in spreads.items()
        ]
    )

    def spread(variant: Variant, num_ranks: int, **where: Any) -> float:
        return Scenario(profile, LINK, **where).step(variant, num_ranks).waiting / math.sqrt(2 * math.log(num_ranks))

    once = Variant("ring", Whole())
    # On machines of their own, as the fewest; on nodes of four, as four; on one machine, as all of them.
    assert spread(once, 8) == pytest.approx(0.001)
    assert spread(once, 8, ranks_per_node=4) == pytest.approx(0.005)
    assert spread(once, 8, same_machine=True) == pytest.approx(0.020)
    assert spread(once._replace(accumulation=4), 8) == pytest.approx(2 * 0.001)


def test_intervals_enclose_the_estimate() -> None:
    profile = made_profile(
        computing=[
            Computing(num_processes=1, step_seconds=Interval(estimate=0.1, low=0.09, high=0.12), spread_seconds=0.002)
        ],
        overlap_slow_down=Interval(estimate=1.1, low=1.0, high=1.3),
        collectives=[collective(2, latency=0.002, bandwidth=1e9)],
    )
    scenario, variant = Scenario(profile, LINK), Variant("ring", profile.sending)
    for ranks in (1, 2, 8, 64):
        step = scenario.step_interval(variant, ranks)
        assert step.low is not None
        assert step.high is not None
        assert step.low < step.estimate < step.high
    ends: tuple[End, ...] = ("low", "estimate", "high")
    assert [scenario.efficiency(variant, 1, end) for end in ends] == [1, 1, 1]


def test_the_parts_of_a_step_add_up_to_the_median_step() -> None:
    times = RankTimes(
        rank=0,
        data_seconds=[0.0, 0.0, 0.0],
        forward_seconds=[1.0, 2.0, 3.0],
        backward_seconds=[3.0, 6.0, 9.0],
        last_backward_seconds=[1.5, 3.0, 4.5],
        update_seconds=[1.0, 2.0, 3.0],
        gradient_bytes={"weight": 4, "unused": 4},
        ready_seconds={"weight": [1.0, 2.0, 3.0], "unused": []},
    )
    assert parts_of(times, 10.0) == pytest.approx((0.0, 2.0, 6.0, 3.0, 2.0))
    assert times.last_ready_of_steps == [1.0, 2.0, 3.0]


def test_what_all_ranks_have_in_common_is_no_spread() -> None:
    assert quartile_spread([[1.0, 5.0, 9.0]] * 2) == 0
    generator = np.random.default_rng(0)
    in_common = generator.normal(scale=10, size=4000)
    for num_ranks in (2, 5):
        by_rank = [(in_common + generator.normal(scale=0.3, size=4000)).tolist() for _ in range(num_ranks)]
        assert quartile_spread(by_rank) == pytest.approx(0.3, rel=0.05)


def test_noise_makes_nothing_faster() -> None:
    assert ratio(certain(0.9), certain(1.0)) == certain(1.0)
    assert ratio(Interval(estimate=2, low=1, high=4), certain(1.0)) == Interval(estimate=2, low=1, high=4)
