"""Networks as people write them: ``25gbit,latency=20us``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS_OF_A_BYTE = 8
_MOST_BITS = 1e15
_MOST_SECONDS = 60.0
# Of an Ethernet frame of 1514 bytes, TCP with timestamps (RFC 9293, RFC 7323), IP (RFC 791) and Ethernet take 66.
PAYLOAD_SHARE = 1448 / 1514
_EXAMPLE = "write it as 25gbit,latency=20us"


@dataclass(frozen=True)
class Link:
    """What a message of S bytes takes: latency + S / bandwidth, the alpha-beta model (Hockney 1994).

    Attributes:
        latency: Seconds from the start of a message until its first byte is there.
        bandwidth: Bytes per second, in each direction at once.
    """

    latency: float
    bandwidth: float

    @property
    def for_data(self) -> Link:
        """This link without what headers take of its bandwidth."""
        return Link(self.latency, PAYLOAD_SHARE * self.bandwidth)

    def through(self, software: Link) -> Link:
        """Returns this link as a library reaches it: latencies add up, and the slower of the two limits the bytes."""
        return Link(self.latency + software.latency, min(self.bandwidth, software.bandwidth))


@dataclass(frozen=True)
class Network:
    """What connects the ranks.

    Attributes:
        link: What connects a node with the others.
        local: What connects the ranks of a node; None if it is as fast as `link`.
    """

    link: Link
    local: Link | None = None

    @property
    def text(self) -> str:
        """The network as `parse_network` reads it, the same for all ways to write it."""
        words = [_rate(self.link.bandwidth), f"latency={_duration(self.link.latency)}"]
        if self.local is not None:
            words += [f"local={_rate(self.local.bandwidth)}", f"local-latency={_duration(self.local.latency)}"]
        return ",".join(words)


UNLIMITED = Network(Link(0.0, math.inf))


def parse_network(text: str) -> Network:
    """Reads a network: a bandwidth in bits per second, with SI prefixes, then what else is known of it.

    ``latency`` is that of a message between two nodes (by default none); ``local`` and ``local-latency`` connect the
    ranks of one node (by default as nodes are connected).

    Raises:
        ValueError: The text is no network.
    """
    first, *rest = (word.strip() for word in text.split(","))
    bandwidth = _read_rate(first)
    facts: dict[str, str] = {}
    for word in rest:
        name, equals, value = word.partition("=")
        if name not in ("latency", "local", "local-latency") or not equals:
            raise ValueError(f"'{word:.40}' is not known; write latency=, local= or local-latency= there")
        if name in facts:
            raise ValueError(f"{name} is given twice; give it once")
        facts[name] = value
    link = Link(_read_duration(facts.get("latency", "0us")), bandwidth)
    if "local" not in facts:
        if "local-latency" in facts:
            raise ValueError("local-latency is given without local; write local=200gbit,local-latency=5us")
        return Network(link)
    local = Link(_read_duration(facts.get("local-latency", "0us")), _read_rate(facts["local"]))
    return Network(link, local)


def read_measured(name: str) -> tuple[str, Network]:
    """Returns how forecasts call a network on which something was measured, and what limits it.

    Args:
        name: How files of all-reduces call it: by its limit, with what it loses (1gbit,latency=5ms,loss=0.1%), or, if
            nothing is known to limit it, in another word.

    Raises:
        ValueError: It begins as a limit, but is none.
    """
    if not name[:1].isdigit():
        return name, UNLIMITED
    limit, *loss = name.partition(",loss=")
    network = parse_network(limit)
    return "".join([network.text, *loss]), network


def _read_rate(word: str) -> float:
    number, unit = _split(word)
    if unit not in _BITS:
        raise ValueError(f"'{word:.40}' is not a bandwidth in kbit, mbit, gbit or tbit per second; {_EXAMPLE}")
    if not 1 <= number * _BITS[unit] <= _MOST_BITS:
        raise ValueError(f"{word:.40} is not possible, a bandwidth is more than 0 and at most 1000tbit; {_EXAMPLE}")
    return number * _BITS[unit] / _BITS_OF_A_BYTE


def _read_duration(word: str) -> float:
    number, unit = _split(word)
    if unit not in _SECONDS:
        raise ValueError(f"'{word:.40}' is not a latency in ns, us, ms or s, which cannot be negative; {_EXAMPLE}")
    if number * _SECONDS[unit] > _MOST_SECONDS:
        raise ValueError(f"latency {word:.40} is longer than a minute; {_EXAMPLE}")
    return number * _SECONDS[unit]


def _split(word: str) -> tuple[float, str]:
    """Returns the number and the unit of a word; an empty unit if it has no such form."""
    found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([a-z]+)", word, re.IGNORECASE)
    return (float(found[1]), found[2].lower()) if found else (0.0, "")


def _rate(bytes_per_second: float) -> str:
    bits = bytes_per_second * _BITS_OF_A_BYTE
    unit = max((unit for unit in _BITS if bits >= _BITS[unit]), key=_BITS.__getitem__, default="kbit")
    return f"{bits / _BITS[unit]:.6g}{unit}"


def _duration(seconds: float) -> str:
    unit = max((unit for unit in _SECONDS if seconds >= _SECONDS[unit]), key=_SECONDS.__getitem__, default="us")
    return f"{seconds / _SECONDS[unit]:.6g}{unit}"
