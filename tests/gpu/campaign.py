"""Everything that wants a GPU, in one go: ``tests/gpu/run.sh``, or ``python -m tests.gpu.campaign``.

First every adapter is held to the contract. Then they race on BERT-base with texts of exactly 128
tokens, one rank on one GPU, in rounds of random order, each run in a process tree of its own. What is
compiled joins after the first round, so that compiling cannot take the time of all others. When the
time is over no further run is started, and the results say what was left out. They go to
docs/results/ as they come, as JSON with every raw number and as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backends.capabilities import PRECISIONS
from backends.devices import count_gpus
from backends.registry import BACKENDS
from contract.check import all_checks
from contract.patience import stretched
from launch.starters.environment import EXACT_FLOAT32
from launch.starters.interface import PROJECT_DIRECTORY
from records.environment import describe_environment
from records.files import write_atomically
from records.throughput import NUM_WARMUP_STEPS
from tests.gpu.contracts import ADAPTERS, NUM_PROCESSES, more_options, unavailable_reason
from tests.gpu.long_texts import write_long_texts
from tests.gpu.report import render

_LOCKSTEP = (sys.executable, "-m", "launch")
_REFUSED = 2
_CORES = len(os.sched_getaffinity(0))
# Sentences enough for any text to fill 128 tokens.
_REVIEWS_PER_TEXT = 20


@dataclass(frozen=True)
class Entry:
    """One competitor."""

    backend: str
    precision: str
    torch_compile: bool
    opt_level: str | None = None

    def __str__(self) -> str:
        level = f" {self.opt_level}" if self.opt_level else ""
        return f"{self.backend}{level} {self.precision}{' compiled' if self.torch_compile else ''}"

    @property
    def arguments(self) -> list[str]:
        arguments = [self.backend, "--num-processes", "1", "--precision", self.precision]
        if self.opt_level:
            arguments += ["--opt-level", self.opt_level]
        if "torchrun" in BACKENDS[self.backend].capabilities.start_methods:
            # Also for Accelerate, whose own launcher makes no group and no wrapper for one rank.
            arguments += ["--start-method", "torchrun"]
        return arguments + (["--torch-compile"] if self.torch_compile else [])


def entries(backends: Sequence[str], device: str) -> list[Entry]:
    """All that the chosen backends can do on this device."""
    found = []
    for name in backends:
        capabilities = BACKENDS[name].capabilities
        for precision in capabilities.precisions[device]:
            levels = ("O1", "O2") if (name, precision) == ("apex", "fp16") else (None,)
            for level in levels:
                found.append(Entry(name, precision, torch_compile=False, opt_level=level))
                if capabilities.compiled_models:
                    found.append(Entry(name, precision, torch_compile=True, opt_level=level))
    return found


class Campaign:
    """One campaign on one machine; what it has found out so far is always on disk."""

    def __init__(self, options: argparse.Namespace, directory: Path, target: Path, results: dict[str, Any]) -> None:
        self.options, self.directory, self.target, self.results = options, directory, target, results
        self.began = time.monotonic()
        path = os.pathsep.join([str(PROJECT_DIRECTORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {**os.environ, **EXACT_FLOAT32, "PYTHONPATH": path}

    @property
    def seconds_left(self) -> float:
        return float(self.options.time_limit) - (time.monotonic() - self.began)

    def keep(self, what: str, **found: Any) -> None:
        """Adds to the results, writes them, and says so."""
        seconds = time.monotonic() - self.began
        self.results |= {**found, "seconds": round(seconds, 1)}
        write_atomically(self.target, json.dumps(self.results, indent=1, allow_nan=False) + "\n")
        write_atomically(self.target.with_suffix(".md"), render(self.results))
        print(f"{seconds:5.0f} s  {what}", flush=True)

    def hold_to_contract(self, adapter: str) -> dict[str, Any]:
        """Returns how the adapter fared, or why it could not be tried."""
        options = self.options
        reason = unavailable_reason(adapter, options.device)
        if reason is not None:
            return {"adapter": adapter, "unavailable": reason}
        target = self.directory / f"{adapter.replace(':', '.')}.json"
        command = ["contract", adapter, "--device", options.device, "--num-processes", NUM_PROCESSES]
        command += more_options(adapter)
        if options.check:
            command += ["--check", options.check]
        # The race shall have its share of the time, whatever hangs here.
        code, output = self._run([*command, "--json", str(target)], seconds=0.5 * options.time_limit)
        if code == _REFUSED and options.check:  # it has none of these clauses
            return {"adapter": adapter, "unavailable": output.strip().splitlines()[-1]}
        if not target.exists():
            return {"adapter": adapter, "broken": output[-2000:]}
        verdicts = json.loads(target.read_text())
        return {
            "adapter": adapter,
            "command": shlex.join(["launch/run.sh", *command]),
            "seconds": verdicts["seconds"],
            "checks": {check["id"]: check["state"] for check in verdicts["checks"]},
            "failures": {check["id"]: check["reason"] for check in verdicts["checks"] if check["state"] == "failed"},
        }

    def race_all(self, competitors: list[Entry]) -> None:
        """Has all competitors take part in each round; those that are compiled are compiled after the others' first."""
        first, later = [1], range(2, self.options.rounds + 1)
        compiled = [entry for entry in competitors if entry.torch_compile]
        plain = [entry for entry in competitors if not entry.torch_compile]
        self.race(plain, first)
        with ThreadPoolExecutor(max(1, _CORES // 3)) as pool:
            warm_ups = dict(zip(compiled, pool.map(self.warm_up, compiled), strict=True))
        broken = [run for run in warm_ups.values() if run and run["record"]["status"] == "failed"]
        late = [f"{entry}, not compiled in time" for entry, run in warm_ups.items() if run is None]
        self.keep(
            f"compiled beforehand: {len(compiled) - len(broken) - len(late)} of {len(compiled)}",
            runs=[*self.results["runs"], *broken], left_out=[*self.results["left_out"], *late],
        )  # fmt: skip
        compiled = [entry for entry, run in warm_ups.items() if run is not None and run not in broken]
        self.race(compiled, first)
        self.race([*plain, *compiled], later)

    def race(self, competitors: list[Entry], rounds: Iterable[int]) -> None:
        """Runs rounds until the time is over, and says what was not run as often as it should be."""
        longest = 20.0
        for number in rounds:
            order = random.Random(f"{self.options.seed} {number}")
            for entry in order.sample(competitors, len(competitors)):
                if self.seconds_left < longest:
                    self.results["left_out"].append(f"{entry}, round {number}")
                    continue
                began = time.monotonic()
                runs = [*self.results["runs"], self.run(entry, round_number=number)]
                self.keep(f"round {number}: {entry}", runs=runs)
                longest = max(longest, time.monotonic() - began)

    def warm_up(self, entry: Entry) -> dict[str, Any] | None:
        """Has the compiler fill its cache, unless the last fifth of the time has begun; returns that run, or None."""
        if self.seconds_left < self.options.time_limit / 5:
            return None
        return self.run(entry, round_number=0, max_steps=4)

    def run(self, entry: Entry, *, round_number: int, max_steps: int | None = None) -> dict[str, Any]:
        """One training; returns its record, or what its ranks said in the end."""
        options = self.options
        output_dir = self.directory / f"{entry}-{round_number}".replace(" ", "-")
        arguments = [*entry.arguments, "--device", options.device, "--model", options.model, "--timeout", "60"]
        sizes = {"--global-batch-size": options.batch_size, "--max-steps": max_steps or options.max_steps}
        arguments += [word for option, size in sizes.items() for word in (option, str(size))]
        arguments += ["--logging-steps", "5", "--max-seq-length", str(options.sequence_length)]
        files = {"--train-file": self.texts("train"), "--validation-file": self.texts("validation")}
        paths = [word for option, path in files.items() for word in (option, str(path))]
        _, output = self._run([*arguments, *paths, "--output-dir", str(output_dir)], seconds=stretched(180))
        record = output_dir / "record.json"
        content = json.loads(record.read_text()) if record.exists() else {"status": "failed", "error": output[-2000:]}
        if content["status"] == "failed":
            logs = sorted(output_dir.glob("logs/rank*.log"))
            content["logs"] = {log.name: log.read_text(errors="replace")[-2000:] for log in logs}
        shutil.rmtree(output_dir, ignore_errors=True)  # half a gigabyte of weights
        command = shlex.join(["launch/run.sh", *arguments])
        return {"entry": str(entry), **asdict(entry), "round": round_number, "command": command, "record": content}

    def texts(self, split: str) -> Path:
        """A file of texts that are all longer than a sequence may be, so that none is padded."""
        path = self.directory / f"{split}.csv"
        if not path.exists():
            num_texts = {"train": max(1024, self.options.batch_size), "validation": 64}[split]
            write_long_texts(path, num_texts=num_texts, reviews_per_text=_REVIEWS_PER_TEXT, seed=len(split))
        return path

    def matmul_rate(self, precision: str) -> float | None:
        """What compare.race.matmul_peak measures; None where the device refuses."""
        command = [sys.executable, "-m", "compare.race.matmul_peak", self.options.device, precision]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, cwd=PROJECT_DIRECTORY)
        return None if done.returncode else float(done.stdout)

    def _run(self, arguments: list[str], *, seconds: float) -> tuple[int | None, str]:
        """Returns the exit code of a command line, None if it took too long, and what it printed."""
        try:
            done = subprocess.run(
                [*_LOCKSTEP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=self.environment, cwd=PROJECT_DIRECTORY, timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired as expiry:
            return None, f"{(expiry.stdout or b'').decode(errors='replace')}\nended after {seconds:.0f} s"
        return done.returncode, done.stdout


def main() -> int:
    """Runs the campaign; returns 0 if everything that could run did and kept the contract."""
    options = _options()
    if options.device == "cuda" and count_gpus() == 0:
        return _refuse("no GPU is visible here; run it on a machine with one")
    environment = describe_environment(with_torch=True)
    machine = environment.gpus[0] if options.device == "cuda" else f"{environment.num_cpus} cores"
    target = options.output_dir / f"{time.strftime('%Y-%m-%d')}-{'-'.join(machine.lower().split())}.json"
    if target.exists():
        return _refuse(f"{target} exists already; remove it or choose another --output-dir")
    backends = options.backends.split(",") if options.backends else list(BACKENDS)
    adapters = [adapter for adapter in ADAPTERS if not options.backends or adapter in backends]
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "tests.gpu.campaign", *sys.argv[1:]]),
        "device": options.device,
        "machine": machine,
        "environment": environment.model_dump(mode="json"),
        "driver": _driver(),
        "matmul_flops_per_second": {},
        "contracts": [],
        "runs": [],
        "left_out": [],
    }
    with tempfile.TemporaryDirectory(prefix="lockstep-campaign-") as directory:
        campaign = Campaign(options, Path(directory), target, results)
        try:
            options.output_dir.mkdir(parents=True, exist_ok=True)
            campaign.keep("begun")
        except OSError as error:
            return _refuse(f"--output-dir {options.output_dir}: {error.strerror}; choose another")
        for split in ("train", "validation"):
            campaign.texts(split)
        with ThreadPoolExecutor(max(1, _CORES // 2)) as pool:
            contracts = list(pool.map(campaign.hold_to_contract, adapters))
        campaign.keep(f"contracts: {', '.join(map(_outcome, contracts))}", contracts=contracts)
        ready = [name for name in backends if unavailable_reason(name, options.device) is None]
        precisions = options.precision.split(",")
        rates = {precision: campaign.matmul_rate(precision) for precision in precisions}
        campaign.keep("matrix products measured", matmul_flops_per_second=rates)
        campaign.race_all([entry for entry in entries(ready, options.device) if entry.precision in precisions])
        campaign.keep("done")
    print(render(results))
    tried = [contract for contract in contracts if "unavailable" not in contract]
    kept = all("checks" in contract and not contract["failures"] for contract in tried)
    return 0 if kept and all(run["record"]["status"] == "completed" for run in results["runs"]) else 1


def _refuse(reason: str) -> int:
    print(f"campaign: {reason}", file=sys.stderr)
    return 2


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only to try the campaign itself")
    parser.add_argument("--backends", metavar="NAME,...", help="only these (default: all that run here)")
    parser.add_argument("--check", metavar="ID,...", help="hold adapters to these checks only")
    parser.add_argument("--precision", metavar="P,...", default=",".join(PRECISIONS), help="race in these only")
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--max-steps", type=int, default=45)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=420, help="seconds after which no run is started")
    parser.add_argument("--output-dir", type=Path, default=PROJECT_DIRECTORY / "docs" / "results")
    options = parser.parse_args()
    if options.max_steps <= NUM_WARMUP_STEPS:
        parser.error(f"--max-steps {options.max_steps}: the first {NUM_WARMUP_STEPS} do not count; take more")
    for option, known in {"backends": [*BACKENDS, *ADAPTERS], "precision": PRECISIONS, "check": all_checks()}.items():
        for word in (getattr(options, option) or "").split(","):
            if word and word not in known:
                parser.error(f"--{option} {word}: there is no such thing; choose from {', '.join(known)}")
    return options


def _outcome(contract: dict[str, Any]) -> str:
    if "checks" not in contract:
        return f"{contract['adapter']} {'unavailable' if 'unavailable' in contract else 'broken'}"
    return f"{contract['adapter']} {'failed' if contract['failures'] else 'kept'}"


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
