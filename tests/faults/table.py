"""The figures of docs/reliability.md, from the campaigns' results: python -m tests.faults.table writes them there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.faults.costs import SIGNS_OF_A_STEP

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"


def render(page: str) -> str:
    """Puts between their marks the tables whose results there are."""
    blocks = {"costs": (_costs, ("costs",)), "figures": (_figures, ("faults", "hostile-inputs"))}
    for mark, (write, names) in blocks.items():
        if all(_path(name).exists() for name in names):
            text = write(*(json.loads(_path(name).read_text()) for name in names))
            block = rf"(<!-- {mark}: [^\n]*-->\n).*?(<!-- end of {mark} -->)"
            page = re.sub(block, lambda match, text=text: f"{match[1]}{text}{match[2]}", page, flags=re.DOTALL)
    return page


def _figures(faults: dict[str, Any], hostile: dict[str, Any]) -> str:
    kills, hangs, resumes, saves = (faults[name] for name in ("kills", "hangs", "resumes", "saves"))
    by = ", ".join(f"{backend} {number}" for backend, number in kills["by_backend"].items())
    phases = ", ".join(f"{phase} {number}" for phase, number in kills["in_phase"].items())
    families = ", ".join(f"{name} {one['tried'] - one['usable']}" for name, one in hostile["families"].items())
    rows = [
        (
            f"a random rank killed at a random moment ({phases}), with `--max-restarts`: the run completes with the "
            "same bits, and loses no step before its newest checkpoint",
            kills["tried"],
            f"{kills['survived']} ({by})",
        ),
        (
            f"a rank that hangs (stopped, in a loop, or in a collective of its own): it is named and the job ended, "
            f"after at most {hangs['longest_seconds']:g} s",
            hangs["tried"],
            hangs["named"],
        ),
        (
            "tests of resume (after every step; from any backend to any; other world sizes and micro-batches)",
            *resumes.values(),
        ),
        (
            "tests of the checkpoint file (100 kills while saving; a bit flipped in each byte of the header; ...)",
            *saves.values(),
        ),
        (f"malformed inputs ({families})", hostile["malformed"], hostile["refused_in_one_line"]),
    ]
    lines = ["", "| fault | tried | survived |", "| --- | --- | --- |"]
    lines += [f"| {what} | {tried} | {survived} |" for what, tried, survived in rows]
    machine = f"{faults['num_cpus']} cores of {faults['cpu']}, commit {faults['git_commit'][:10]}"
    lines += [
        "",
        f"Median from a kill to the first step of the next start: {kills['median_seconds_to_resume']:g} s. {machine}.",
        "",
        *(f"- `{one['command']}`" for one in (faults, hostile)),
        "",
    ]
    return "\n".join(lines) + "\n"


def _costs(costs: dict[str, Any]) -> str:
    save, share = costs["seconds_of_a_checkpoint"], costs["share_at_default"]
    sign, step = costs["sign_of_life_seconds"], costs["step_seconds"]
    return (
        f"\nA checkpoint of the default job ({costs['checkpoint_bytes'] / 2**20:.0f} MiB) costs "
        f"{save['mean'] * 1e3:.0f} ms [{save['low'] * 1e3:.0f}, {save['high'] * 1e3:.0f}] in all. With the default of "
        f"one in {costs['default_interval']} steps of {step * 1e3:.0f} ms, that is {share['mean']:.2%} of the time (at "
        f"most {share['high']:.2%}). {SIGNS_OF_A_STEP} heartbeats a step, of {sign * 1e6:.1f} us each, are "
        f"{SIGNS_OF_A_STEP * sign / step:.4%}. "
        f"{costs['num_cpus']} cores of {costs['cpu']}, commit {costs['git_commit'][:10]}, `{costs['command']}`.\n\n"
    )


def _path(name: str) -> Path:
    return ROOT / "docs" / "results" / f"{name}.json"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
