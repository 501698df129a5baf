"""What the adapters of torch.distributed do with tensors that NCCL refuses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from backends.torch_group import broadcast_from_first


def test_tensors_of_any_layout_are_broadcast_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_first(values: torch.Tensor, src: int) -> None:
        assert values.is_contiguous()
        assert src == 0
        values.copy_(torch.arange(values.numel()).view(values.shape))

    monkeypatch.setattr(dist, "broadcast", from_first)
    plain, transposed, strided = torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2, 6)[:, ::2]
    images = torch.zeros(2, 2, 2, 2).to(memory_format=torch.channels_last)
    parameter = torch.nn.Parameter(torch.zeros(3, 2).t())
    tensors = [plain, transposed, strided, images, parameter]
    layouts = [tensor.stride() for tensor in tensors]
    broadcast_from_first(tensors)
    for tensor in tensors:
        assert tensor.flatten().tolist() == list(range(tensor.numel()))
    assert [tensor.stride() for tensor in tensors] == layouts
