"""Apex adapters whose own options are chosen beforehand, for the contract command, which gives none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from backends.apex_settings import ApexSettings
from backends.interface import BackendOptions


class ChosenSettings:
    """Goes before an adapter's class; a level of fp16 is left out where fp32 is asked for."""

    chosen: ClassVar[dict[str, Any]] = {}

    def __init__(self, options: BackendOptions) -> None:
        chosen = self.chosen if options.precision == "fp16" or "opt_level" not in self.chosen else {}
        super().__init__(replace(options, settings=ApexSettings(**chosen)))  # type: ignore[call-arg]
