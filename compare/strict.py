"""What all parts of results have in common."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """A part of results: it has no other fields than its own, and finite numbers only."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def named(backend: str, own_options: Sequence[str]) -> str:
    """Returns what a backend with options of its own is called."""
    return " ".join((backend, *own_options))


class OfBackend(Strict):
    """A part of results that is about one backend."""

    backend: str
    own_options: list[str] = Field(
        default=[], description="options of the backend alone that differ from its defaults, each as --name=value"
    )

    @property
    def name(self) -> str:
        """The backend with its own options."""
        return named(self.backend, self.own_options)
