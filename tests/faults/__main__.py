"""Faults many times over: python -m tests.faults [--kills 100 --hangs 2] writes docs/results/faults.json."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from records.environment import describe_environment
from tests.faults.hangs import HANGS, hang_one
from tests.faults.kills import Kill, campaign, summary
from tests.launching import DISTRIBUTED

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "faults.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="ranks to kill at random moments")
    parser.add_argument("--hangs", type=int, default=2, help="jobs for each backend and way to hang")
    parser.add_argument("--resumes", action=argparse.BooleanOptionalAction, default=True, help="also run their tests")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    environment = describe_environment(with_torch=False)
    figures: dict[str, Any] = {
        "command": f"python -m tests.faults --kills {options.kills} --hangs {options.hangs} --seed {options.seed}",
        "cpu": environment.cpu,
        "num_cpus": environment.num_cpus,
        "git_commit": environment.git_commit,
        "packages": environment.packages,
    }
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        place = Path(name)
        kills = campaign(DISTRIBUTED, options.kills, place, options.seed, _tell)
        figures["kills"] = summary(kills)
        hangs = [
            hang_one(backend, fault, place / f"{number}-{backend}-{fault}")
            for number in range(options.hangs)
            for backend in DISTRIBUTED
            for fault in HANGS
        ]
        figures["hangs"] = {
            "tried": len(hangs),
            "named": sum(not hang.problems for hang in hangs),
            "longest_seconds": round(max((hang.seconds for hang in hangs), default=0.0), 1),
            "failures": [asdict(hang) for hang in hangs if hang.problems],
        }
        if options.resumes:
            figures["resumes"] = _count_tests(["tests/test_resume.py"], place)
            figures["saves"] = _count_tests(["tests/test_checkpoint.py"], place)
    options.output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def _tell(kill: Kill) -> None:
    outcome = "; ".join(kill.problems) or f"went on after step {kill.resumed_at}"
    print(f"{kill.backend}: rank {kill.rank} killed at {kill.position}: {outcome}", flush=True)


def _count_tests(files: list[str], place: Path) -> dict[str, int]:
    """Runs tests and counts them."""
    report = place / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *files]
    subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
    (suite,) = ElementTree.parse(report).getroot()
    tests, failures, errors = (int(suite.attrib[name]) for name in ("tests", "failures", "errors"))
    return {"tried": tests, "passed": tests - failures - errors - int(suite.attrib["skipped"])}


if __name__ == "__main__":
    main()
