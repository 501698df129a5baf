"""The parts of a page: sections that contain text, tables and figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from markupsafe import Markup

from compare.numbers import NOTHING, number


@dataclass(frozen=True)
class Cell:
    """What a table shows in a cell and, if it is a number, the number to sort by."""

    text: str
    value: float | None = None


def measured(value: float | None, scale: float = 1, written: Callable[[float], str] = number) -> Cell:
    """Returns a cell for `value` times `scale`, in the unit that the column names; a dash if there is no value."""
    return Cell(NOTHING) if value is None else Cell(written(value * scale), value * scale)


@dataclass(frozen=True)
class Row:
    """Cells, the first of which names the row; `mark` says what is special: unranked, failed or differs."""

    cells: list[Cell]
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """A table; the units are in the names of its columns."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: list[str]
    rows: list[Row]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers."""
        return [any(row.cells[i].value is not None for row in self.rows) for i in range(len(self.columns))]

    def without_empty_columns(self) -> Table:
        """Returns the table without columns in which all cells are empty."""
        kept = [i for i in range(len(self.columns)) if any(row.cells[i].text not in ("", NOTHING) for row in self.rows)]
        rows = [Row([row.cells[i] for i in kept], row.mark) for row in self.rows]
        return Table(self.caption, [self.columns[i] for i in kept], rows)


@dataclass(frozen=True)
class Plot:
    """One drawing in SVG, and what it shows, in words, for those who do not see it."""

    label: str
    drawing: Markup


@dataclass(frozen=True)
class Figure:
    """Drawings of the same numbers, their caption, and the numbers, unless a table beside them has these."""

    kind: ClassVar[str] = "figure"
    title: str
    caption: str
    plots: list[Plot]
    data: Table | None = None


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Lines:
    """A list, one item a line."""

    kind: ClassVar[str] = "lines"
    items: list[str]


@dataclass(frozen=True)
class Commands:
    """Command lines, each with what it is for."""

    kind: ClassVar[str] = "commands"
    commands: dict[str, str]


Block = Table | Figure | Text | Lines | Commands


@dataclass(frozen=True)
class Section:
    """A heading and what is below it; a page leaves out a section without content."""

    id: str
    heading: str
    blocks: list[Block] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
