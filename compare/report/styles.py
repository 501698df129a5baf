"""How backends look in drawings: colour, mark and dash, so that colour is never the only difference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

# charts.css has the colours and dashes, `drawing.py` the marks.
NUM_COLOURS, NUM_MARKS, NUM_DASHES = 7, 6, 5


@dataclass(frozen=True)
class Style:
    """How a backend looks in every drawing: numbers of a colour, a mark and a dash; `is_open` marks are not filled."""

    colour: int
    mark: int
    dash: int
    is_open: bool = False

    def varied(self, times: int) -> Style:
        """Returns the look of the same backend where it appears once more in one drawing."""
        return Style(self.colour, self.mark, (self.dash + times) % NUM_DASHES, is_open=times > 0)

    def hollow(self) -> Style:
        """Returns the look of a backend of which nothing is claimed."""
        return replace(self, is_open=True)


def styles_for(backends: Iterable[str]) -> dict[str, Style]:
    """Gives each backend a look of its own."""
    return {
        backend: Style(i % NUM_COLOURS, i % NUM_MARKS, i % NUM_DASHES)
        for i, backend in enumerate(dict.fromkeys(backends))
    }
