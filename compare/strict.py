"""What all parts of results have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A part of results: it has no other fields than its own, and finite numbers only."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
