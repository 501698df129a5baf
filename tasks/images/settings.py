"""The options of the task that classifies images."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from tasks.images.drawing import NUM_TRAIN, NUM_VALIDATION
from tasks.interface import TaskSettings


class ImageClassificationSettings(TaskSettings):
    """The model, and where the images come from."""

    model: Literal["resnet-tiny", "resnet18", "resnet34", "resnet50"] = Field(
        "resnet-tiny", description="a preset with fresh weights"
    )
    data_dir: Path | None = Field(
        None,
        description="directory of the four files of FashionMNIST, or of others in its format "
        "(default: drawn images, which need no file)",
    )
    num_train_samples: int | None = Field(
        None, gt=0, le=100_000, description=f"drawn training images (default: {NUM_TRAIN})"
    )
    num_validation_samples: int | None = Field(
        None, gt=0, le=100_000, description=f"drawn validation images (default: {NUM_VALIDATION})"
    )
    dtype: Literal["float32", "float64"] = Field("float32", description="of the parameters")

    # The ranks read these settings again, in another working directory than the user's.
    @field_validator("data_dir")
    @classmethod
    def _absolute_directory(cls, path: Path | None) -> Path | None:
        return path.absolute() if path is not None else None

    @model_validator(mode="after")
    def _files_have_a_number(self) -> ImageClassificationSettings:
        for name in ("num_train_samples", "num_validation_samples"):
            number = getattr(self, name)
            if self.data_dir is not None and number is not None:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{option} {number} is of drawn images, and --data-dir {self.data_dir} has a number of its own; "
                    "leave one of the two out"
                )
        return self
