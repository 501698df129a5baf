"""A headless Chromium, and what it saw of a page."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def what_chromium_lacks() -> str | None:
    """Says why no Chromium can be started on this machine; returns None if one can."""
    if _executable() is None:
        return f"none of {', '.join(_NAMES)} is on PATH"
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None


def require_chromium() -> None:
    """Skips a test where no Chromium can be started, but fails it where REQUIRE_BROWSER is set."""
    reason = what_chromium_lacks()
    if reason is not None and os.environ.get("REQUIRE_BROWSER"):
        pytest.fail(f"REQUIRE_BROWSER is set, but {reason}")
    if reason is not None:
        pytest.skip(f"needs Chromium: {reason}")


@contextmanager
def chromium() -> Iterator[Any]:
    """Starts the Chromium of this machine, if `require_chromium` finds one."""
    require_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium does not sandbox what root starts.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=_executable(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()


def _executable() -> str | None:
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Visit:
    """One page opened, with all that it asked for and complained of."""

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        self.url = file.resolve().as_uri()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.goto(self.url)

    def close(self) -> None:
        self.context.close()
