"""On a GPU, torch's autocast computes cross-entropy in the precision of the scores; on a CPU, in float32.

    python docs/findings/torch_cross_entropy_on_gpu.py    # on a machine with a GPU

The dtype of log_softmax inside cross_entropy, whose scores are in bfloat16, and how far the gradient is from that of
scores that are converted first.
"""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode


class Dtypes(TorchDispatchMode):
    """Keeps the dtype of each log_softmax."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is torch.ops.aten._log_softmax.default:
            self.seen.append(str(arguments[0].dtype))
        return function(*arguments, **(options or {}))


def gradient(scores, targets, dtype):
    """Returns the gradient of the scores, whose loss is computed in `dtype`, and the dtypes of its logarithms."""
    leaf = scores.clone().requires_grad_()
    with torch.autocast(scores.device.type, dtype=torch.bfloat16), Dtypes() as dtypes:
        loss = cross_entropy(leaf.to(dtype), targets, reduction="sum")
    loss.backward()
    return leaf.grad.float(), dtypes.seen


if not torch.cuda.is_available():
    sys.exit("this needs a GPU")
torch.manual_seed(1)
scores, targets, found = torch.randn(64, 5).bfloat16(), torch.randint(0, 5, (64,)), {}
for device in ("cpu", "cuda"):
    half, dtypes = gradient(scores.to(device), targets.to(device), torch.bfloat16)
    exact, _ = gradient(scores.to(device), targets.to(device), torch.float32)
    found[device] = dtypes
    print(f"{device}: log_softmax in {', '.join(dtypes)}, gradients differ by {(half - exact).abs().max():.1g}")
as_described = found == {"cpu": ["torch.float32"], "cuda": ["torch.bfloat16"]}
print("as described" if as_described else "changed: expected float32 on a CPU and bfloat16 on a GPU")
sys.exit(0 if as_described else 1)
