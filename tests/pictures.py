"""Pictures of a report as readers see it: ``python -m tests.pictures REPORT.html DIRECTORY``.

Each shows the page as it opens, with nothing unfolded: in a wide and in a narrow window, in light and in dark colours,
as it is printed, and, as Chromium emulates it, to readers who see fewer colours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.browser import Visit, chromium, what_chromium_lacks


class View(NamedTuple):
    """How a reader sees a report.

    Attributes:
        width: The width of the window or of the paper, in pixels.
        scheme: The colour scheme, light or dark.
        media: What shows the page: screen or print.
        deficiency: The deficiency of colour vision, as Chromium names it.
    """

    width: int = 1300
    scheme: str = "light"
    media: str = "screen"
    deficiency: str = "none"


_SCHEMES = ("light", "dark")
_DEFICIENCIES = ("deuteranopia", "protanopia", "tritanopia", "achromatopsia")
# A4 between margins of 14 mm, at 96 dots an inch.
_PAPER = int((210 - 28) / 25.4 * 96)
# By the names of their files.
VIEWS = {
    **{f"{width}-{scheme}": View(width, scheme) for width in (1300, 420) for scheme in _SCHEMES},
    "print": View(_PAPER, media="print"),
    **{f"{one}-{scheme}": View(scheme=scheme, deficiency=one) for one in _DEFICIENCIES for scheme in _SCHEMES},
}


def save_picture(browser: Any, report: Path, view: View, picture: Path) -> None:
    """Saves one picture of a report as PNG."""
    seen = Visit(browser, report, viewport={"width": view.width, "height": 900}, color_scheme=view.scheme)
    seen.page.emulate_media(media=view.media)
    devtools = seen.context.new_cdp_session(seen.page)
    devtools.send("Emulation.setEmulatedVisionDeficiency", {"type": view.deficiency})
    seen.page.screenshot(path=picture, full_page=True)
    seen.close()


def main(arguments: Sequence[str]) -> None:
    """Saves a picture for each view of a report."""
    parser = argparse.ArgumentParser(prog="python -m tests.pictures", description=__doc__)
    parser.add_argument("report", type=Path, metavar="REPORT.html", help="the page of a report")
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="receives the pictures")
    asked = parser.parse_args(arguments)
    if not asked.report.is_file():
        parser.error(f"{asked.report}: there is no such file; name the report.html of a race")
    if (reason := what_chromium_lacks()) is not None:
        parser.error(f"{reason}; install Chromium and the packages of the tests (CONTRIBUTING.md)")
    try:
        asked.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{asked.directory}: {error.strerror}; name another directory")
    with chromium() as browser:
        for name, view in VIEWS.items():
            save_picture(browser, asked.report, view, asked.directory / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
