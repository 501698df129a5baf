"""torch's AdamW(fused=True) reads parameter and state in the order of memory, without a look at their layouts.

    python docs/findings/torch_fused_state_layout.py

Two steps with a state_dict saved and loaded in between: as it is, and with moments of the same values that are laid out
as a transposed matrix, as they are where the parameter was transposed, or in channels_last, in the run that saved them.
"""

import sys

import torch


def weight_after_two_steps(*, fused: bool, is_turned: bool) -> torch.Tensor:
    """Takes two steps, and loads the optimizer's state after each of them."""
    weight = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    for number in (1, 2):
        weight.grad = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).sub(5).pow(number)
        optimizer.step()
        state = optimizer.state_dict()
        if is_turned:
            moments = state["state"][0]
            for name in ("exp_avg", "exp_avg_sq"):
                moments[name] = moments[name].t().contiguous().t()
        optimizer.load_state_dict(state)
    return weight.detach()


seen = {}
for fused in (False, True):
    one, other = (weight_after_two_steps(fused=fused, is_turned=is_turned) for is_turned in (False, True))
    seen[fused] = float((one - other).abs().max())
    print(f"fused={fused}: the layout of the loaded moments changes the weight by up to {seen[fused]:.3g}")

as_described = seen[False] == 0 and seen[True] > 1e-3
print("as described" if as_described else "changed: expected 0, then a difference")
sys.exit(0 if as_described else 1)
