"""Tasks that go wrong on purpose, for the tests of failures."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from launch.starters.environment import rank_of_process
from tasks.interface import Batch, Split
from tasks.token_tagging import TokenTagging, TokenTaggingSettings

if TYPE_CHECKING:
    import torch


class SlowSettings(TokenTaggingSettings):
    seconds: float = Field(0.3, description="what each batch takes")
    slow_rank: int = Field(-1, description="the only rank that is slow (-1: all)")


class SlowTask(TokenTagging):
    """Takes its time over each batch."""

    Settings = SlowSettings
    settings: SlowSettings

    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        if split == "train" and self.settings.slow_rank in (-1, rank_of_process()):
            time.sleep(self.settings.seconds)
        return super().collate(split, sample_ids)


class HeldSettings(TokenTaggingSettings):
    until: Path = Field(Path("/"), description="the file without which the fourth batch is not handed out")


class HeldTask(TokenTagging):
    """Waits in its fourth batch for a file, however long whoever is to write it has to wait for a processor."""

    Settings = HeldSettings
    settings: HeldSettings
    _num_batches = 0

    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        self._num_batches += split == "train"
        while self._num_batches == 4 and not self.settings.until.exists():
            time.sleep(0.01)
        return super().collate(split, sample_ids)


class CompanyTask(TokenTagging):
    """Takes its time over each batch; alone, a rank waits after its first few for others to come, which end it."""

    _num_batches = 0

    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        self._num_batches += split == "train"
        time.sleep(0.2)
        while self._num_batches > 8 and os.environ["WORLD_SIZE"] == "1":
            time.sleep(0.1)
        return super().collate(split, sample_ids)


class BulkyTask(TokenTagging):
    """Carries 8 MiB to each worker that loads data, through shared memory."""

    def prepare(self) -> None:
        import torch

        self._burden = torch.zeros(2**20, dtype=torch.float64)


class UnreadyTask(TokenTagging):
    """Has no data for rank 1, which fails before it joins the others."""

    def prepare(self) -> None:
        if rank_of_process() == 1:
            raise OSError("the disk of this node is gone")
        super().prepare()


class DyingTask(TokenTagging):
    """Rank 1 dies without a word over its fifth batch, in the first start of a run."""

    _num_batches = 0

    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        self._num_batches += split == "train"
        if self._num_batches == 5 and rank_of_process() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().collate(split, sample_ids)


class HangingSettings(TokenTaggingSettings):
    fault: str = Field("", description="how the rank hangs")
    faulty_rank: int = Field(1, description="the rank that hangs")
    faulty_batch: int = Field(5, description="in which of its batches, from 1")
    faulty_split: str = Field("train", description="of which split")


class HangingTask(TokenTagging):
    """One rank stops taking part, in one of several ways."""

    Settings = HangingSettings
    settings: HangingSettings
    _num_batches = 0

    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        if split == self.settings.faulty_split and rank_of_process() == self.settings.faulty_rank:
            self._num_batches += 1
            if self._num_batches == self.settings.faulty_batch:
                self._hang()
        return super().collate(split, sample_ids)

    def _hang(self) -> None:
        print(f"fault at {time.time()}", flush=True)
        if self.settings.fault == "is-stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        while self.settings.fault == "loops":
            math.sqrt(2)
        if self.settings.fault == "waits-alone":
            self._wait_alone()

    def _wait_alone(self) -> None:
        """Enters a collective that no other rank ever enters."""
        import torch

        if "HOROVOD_RANK" in os.environ:
            import horovod.torch as hvd

            hvd.allreduce(torch.ones(3), name="alone")
        else:
            torch.distributed.monitored_barrier()


class NonFiniteSettings(TokenTaggingSettings):
    bad_sample: int = Field(17, description="the training sample whose loss is not finite")
    bad_constant: bool = Field(False, description="whether its gradient is finite all the same")


class NonFiniteTask(TokenTagging):
    """The loss of one sample is not a number, or infinite by a constant."""

    Settings = NonFiniteSettings
    settings: NonFiniteSettings

    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        import torch

        batch = super().collate(split, sample_ids)
        is_bad = split == "train" and self.settings.bad_sample in [int(one) for one in sample_ids]
        tensors: dict[str, Any] = {**batch.tensors, "is_bad": torch.full((len(sample_ids),), is_bad)}
        return Batch(tensors, batch.num_tokens, batch.num_positions)

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        loss = super().loss_sum(model, batch)
        if batch.tensors["is_bad"][0]:
            loss = loss + math.inf if self.settings.bad_constant else loss * math.nan
        return loss


class UnsavableTask(TokenTagging):
    """Cannot write its model, after having written half of it."""

    def save(self, model: torch.nn.Module, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise ValueError("no such format")


class SlowlySavedTask(TokenTagging):
    """Takes longer to write its model than a launcher has patience with a job that has failed."""

    def save(self, model: torch.nn.Module, directory: Path) -> None:
        time.sleep(10)
        super().save(model, directory)
