"""An optimizer prepared by Accelerate looks for a package that is not installed, twice in each step.

    ACCELERATE_USE_CPU=true python docs/findings/accelerate_step_lookups.py

Two optimizers of one number each take steps in turn: one that Accelerate has prepared, and one that it has not.
"""

import importlib.util
import statistics
import sys
import time

import torch
from accelerate import Accelerator

NUM_STEPS = 1000


def make_optimizer() -> torch.optim.Optimizer:
    """Returns an optimizer of one number that has a gradient."""
    number = torch.nn.Parameter(torch.ones(1))
    number.grad = torch.ones(1)
    return torch.optim.SGD([number], lr=0.1)


looked_for = []
find_spec = importlib.util.find_spec


def noted_find_spec(name: str, package: str | None = None) -> object:
    """Does what it replaces, and notes the name."""
    looked_for.append(name)
    return find_spec(name, package)


def step(optimizer: torch.optim.Optimizer) -> None:
    """Takes the part of a training step that is the optimizer's."""
    optimizer.step()
    optimizer.zero_grad()


plain, prepared = make_optimizer(), Accelerator().prepare(make_optimizer())
importlib.util.find_spec = noted_find_spec
step(prepared)
importlib.util.find_spec = find_spec

seconds: list[list[float]] = [[], []]
for _ in range(NUM_STEPS):
    for optimizer, times in zip((plain, prepared), seconds, strict=True):
        began = time.perf_counter()
        step(optimizer)
        times.append(time.perf_counter() - began)
without, with_accelerate = (1e6 * statistics.median(times) for times in seconds)
print(f"looked for in a step: {', '.join(looked_for)}")
print(f"a step of one number: {without:.0f} us, of one that is prepared: {with_accelerate:.0f} us")
as_described = looked_for == ["lomo_optim", "lomo_optim"]
print("as described" if as_described else "changed: expected that lomo_optim is looked for twice")
sys.exit(not as_described)
