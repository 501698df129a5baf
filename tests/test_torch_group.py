"""The adapters of torch.distributed: tensors that NCCL refuses, the size of buckets, and the group of a dry run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from backends.pretended_group import PretendedGroup
from backends.torch_group import broadcast_from_first
from tests.launching import train


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


def test_copies_that_gloo_makes_are_written_and_held_with_the_work() -> None:
    group, whole, part = PretendedGroup(4), torch.zeros(4000), torch.arange(1000.0)
    gathered = group._allgather_base(whole, part).get_future().value()
    assert torch.equal(whole, part.repeat(4))
    # The second is the copy of a thread of gloo, the third is there for a profiler that does not see this thread.
    assert [tensor.nbytes for tensor in gathered] == [whole.nbytes] * 3
    assert torch.equal(gathered[1], whole)
    scattered, copy = group._reduce_scatter_base(torch.zeros(1000), whole).get_future().value()
    assert torch.equal(scattered, part)
    assert torch.equal(copy, whole)
    assert copy.data_ptr() != whole.data_ptr()
    assert group.entered == {"allgather_base": whole.nbytes, "reduce_scatter_base": whole.nbytes}


@pytest.mark.slow
def test_a_bucket_may_be_smaller_than_a_mebibyte(tmp_path: Path) -> None:
    options = ("--task", "token-tagging", "--num-processes", "2", "--max-steps", "1", "--no-evaluate")
    record = train("ddp", tmp_path / "run", *options, "--bucket-cap-mb", "0.5")
    assert {rank["effective_settings"]["bucket_bytes"] for rank in record["ranks"]} == {2**19}
