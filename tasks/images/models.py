"""ResNets of published sizes with fresh weights, for images of one channel.

The sizes are those of table 1 of He et al. 2015 (https://arxiv.org/abs/1512.03385); `resnet-tiny` has as many stages as
suit small images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Shape(NamedTuple):
    """The layers of a model: their kind, the channels of the first one, and for each stage channels and depth."""

    layer_type: str
    embedding_size: int
    hidden_sizes: tuple[int, ...]
    depths: tuple[int, ...]


PRESETS = {
    "resnet-tiny": _Shape("basic", 16, (16, 32, 64), (1, 1, 1)),
    "resnet18": _Shape("basic", 64, (64, 128, 256, 512), (2, 2, 2, 2)),
    "resnet34": _Shape("basic", 64, (64, 128, 256, 512), (3, 4, 6, 3)),
    "resnet50": _Shape("bottleneck", 64, (256, 512, 1024, 2048), (3, 4, 6, 3)),
}


def build_preset(name: str, labels: list[str]) -> PreTrainedModel:
    """Builds a model with random weights.

    Args:
        name: A key of PRESETS.
        labels: All labels in order.

    Returns:
        A ResNetForImageClassification on the CPU, in float32.
    """
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=1,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        **PRESETS[name]._asdict(),
    )
    return ResNetForImageClassification(config)


def smallest_image(name: str) -> int:
    """Returns how many pixels an image needs in each direction for the last layers to have 2 x 2 values of it.

    The first layer, the pooling after it and each stage but the first halve what they get, rounded up. Of a single
    value BatchNorm can compute no variance, which matters where a micro-batch has a single sample.
    """
    return (2 << len(PRESETS[name].depths)) + 1
