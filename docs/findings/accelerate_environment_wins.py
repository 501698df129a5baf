"""A variable in the environment beats an argument of Accelerator, for one argument and not for another.

python docs/findings/accelerate_environment_wins.py
"""

import os
import sys

from accelerate import Accelerator

os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "8"
os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="no")

as_described = accelerator.gradient_accumulation_steps == 8 and accelerator.mixed_precision == "no"
print(f"accumulation steps: argument 2, environment 8, in force {accelerator.gradient_accumulation_steps}")
print(f"mixed precision: argument no, environment bf16, in force {accelerator.mixed_precision}")
print("as described" if as_described else "changed: expected 8 and no")
sys.exit(0 if as_described else 1)
