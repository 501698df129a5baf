"""torch's AdamW(fused=True) decides itself whether to skip, so GradScaler calls its step() also when it skips.

    python docs/findings/torch_fused_adamw_skip.py

One step with an infinite gradient. Accelerate's optimizer tells a skipped step by step() not having been called.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

Accelerator(cpu=True)  # its optimizer insists on one
seen = {}
for fused in (False, True):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    calls = []
    optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("step"))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerated = AcceleratedOptimizer(optimizer, device_placement=False, scaler=scaler)

    scaler.scale((weight * float("inf")).sum()).backward()
    accelerated.step()
    seen[fused] = (len(calls), weight.item(), scaler.get_scale(), accelerated.step_was_skipped)
    print(
        f"fused={fused}: step() called {len(calls)} times, weight {weight.item():g}, scale 1024 -> "
        f"{scaler.get_scale():g}, Accelerate says skipped: {accelerated.step_was_skipped}"
    )

as_described = seen == {False: (0, 1.0, 512.0, True), True: (1, 1.0, 512.0, False)}
print("as described" if as_described else "changed: expected 0 calls and skipped, then 1 call and not skipped")
sys.exit(0 if as_described else 1)
