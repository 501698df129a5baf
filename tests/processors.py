"""Holds backends to the contract as the processor that the environment describes: ``python -m tests.processors``.

Prints a line for each clause that does not hold, and ends with code 1 if there is one. Options: the checks (--check,
default: those that kernels can break), the world sizes (--num-processes, default: 2) and the adapters. With --bert,
BERT is trained, too, and must end with the same bits under every backend.

The ranks are forked from a server that has loaded torch with these variables.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from contract.cases import BITS
from contract.check import Evidence, State
from contract.options import ContractOptions
from contract.suite import Suite
from tests.forked.client import forked_job, session
from tests.launching import OF_EACH_STARTER, train

# Equal bits with a simulation, with a repetition and with a resumed training, and half precision.
CHECKS = ("C24", "C28", "C35", "C39")
ADAPTERS = [*OF_EACH_STARTER, "tests.by_hand:ByHandBackend"]


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("adapters", nargs="*", default=ADAPTERS)
    parser.add_argument("--check", default=",".join(CHECKS))
    parser.add_argument("--num-processes", default="2")
    parser.add_argument("--precision", default="fp32,bf16")
    parser.add_argument("--bert", action="store_true")
    options = parser.parse_args()
    asked = ContractOptions(
        device="cpu", num_processes=options.num_processes, precision=options.precision, check=options.check
    )
    failures = 0
    finals: dict[str, dict[str, torch.Tensor]] = {}
    with tempfile.TemporaryDirectory(prefix="lockstep-processors-") as directory, session():
        for number, adapter in enumerate(options.adapters):
            suite = Suite(adapter, Path(directory) / str(number), asked, compose=forked_job)
            results = list(suite.results())
            failed = [result for result in results if result.state is State.FAILED]
            failures += len(failed)
            passed = sum(result.state is State.PASSED for result in results)
            print(f"{adapter}: {passed} passed, {len(failed)} failed", flush=True)
            for result in failed:
                print(f"{adapter} {result.instance}: {result.reason}", flush=True)
            if any(result.instance.case is BITS and result.state is State.PASSED for result in results):
                evidence = suite.evidence(BITS, 2)
                assert isinstance(evidence, Evidence)
                finals[adapter] = evidence.ranks[0][0]["steps"][-1]["weights"]
        if options.bert:
            failures += _bert_ends_with_other_bits(Path(directory))
    for adapter, weights in finals.items():
        first, expected = next(iter(finals.items()))
        if not all(torch.equal(weights[name], tensor) for name, tensor in expected.items()):
            failures += 1
            print(f"{adapter} ends with other bits than {first}")
    return 1 if failures else 0


def _bert_ends_with_other_bits(directory: Path) -> bool:
    """Trains BERT, with dropout and accumulation, under each backend."""
    options = ("--num-processes", "2", "--max-steps", "4", "--dropout", "0.1", "--micro-batch-size", "8")
    options += ("--no-evaluate",)
    digests = {}
    for backend in OF_EACH_STARTER:
        record = train(backend, directory / f"bert-{backend}", *options)
        digests[backend] = record["ranks"][0]["weights_sha256"]
        print(f"{backend}: {record['environment']['variables']}")
    if len(set(digests.values())) > 1:
        print(f"BERT ends with different bits: {digests}")
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
