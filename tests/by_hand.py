"""A whole adapter, as anyone may write one: gradients are averaged by hand with torch.distributed.

PYTHONPATH=. launch/run.sh contract tests.by_hand:ByHandBackend
"""

import os
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from backends.interface import Backend, BackendOptions, Capabilities, StepResult


class ByHandBackend(Backend):
    """One all_reduce a step, of all gradients as one vector."""

    name = "by-hand"
    capabilities = Capabilities({"cpu": ("fp32", "bf16")}, start_methods=("torchrun",), unused_parameters=False)

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)  # refuses what is not declared, before there is any group
        dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout_seconds))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank, self.device = int(os.environ["LOCAL_RANK"]), torch.device("cpu")

    def setup(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        return model, optimizer

    def autocast(self):
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.options.precision == "bf16")

    def no_sync(self):
        return nullcontext()  # nothing is ever reduced before `step`

    def backward(self, loss):
        loss.backward()

    def step(self, max_grad_norm):
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        vector = torch.cat([parameter.grad.flatten() for parameter in parameters]) / self.world_size
        dist.all_reduce(vector)
        for parameter, gradient in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
            parameter.grad.copy_(gradient.view_as(parameter))
        norm = vector.norm()
        if max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        if not (skipped := self.must_skip(norm)):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(norm, skipped)

    def all_reduce(self, tensor, op="sum"):
        reduced = tensor.clone()
        dist.all_reduce(reduced, op=getattr(dist.ReduceOp, op.upper()))
        return reduced

    def barrier(self):
        dist.barrier()

    def unwrap(self, model):
        return model

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def effective_settings(self):
        return {"transport": dist.get_backend()}

    def shutdown(self):
        dist.barrier()
        dist.destroy_process_group()
