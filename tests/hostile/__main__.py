"""Tries hostile inputs: python -m tests.hostile [--examples 100] writes docs/results/hostile-inputs.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.hostile.families import FAMILIES
from tests.hostile.special import SPECIAL
from tests.hostile.victim import victim

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "hostile-inputs.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="of each family that hypothesis thinks of")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with victim() as target:
        for attack in SPECIAL:
            attack(target)
            print(f"{attack.__name__}: refused")
        for name, family in FAMILIES.items():
            family(target, options.examples)
            print(f"{name}: {target.tally.tried[name]} tried, {target.tally.accepted[name]} of them usable")
        figures = {"command": f"python -m tests.hostile --examples {options.examples}", **target.tally.figures()}
    options.output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
