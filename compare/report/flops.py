"""How many floating-point operations training takes, as needed for the model FLOP utilisation (MFU).

The PaLM paper defines MFU in appendix B (https://arxiv.org/abs/2204.02311): the operations that the model needs,
whatever a program computes beyond them, over those that the device could have done in the same time.
"""

from __future__ import annotations

from records.record import RunRecord
from records.throughput import NUM_WARMUP_STEPS, training_seconds

# Dense, in operations a second, by the names that CUDA gives: vendors' data sheets. For fp32 the plain
# cores, since TF32 is off. Other parts of the same name (PCIe, NVL) are slower and not listed.
# https://resources.nvidia.com/en-us-gpu-resources/h200-datasheet-24306 and those of H100, A100 and V100.
_HOPPER = {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12}
_AMPERE = {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12}
_PEAKS = {
    "NVIDIA H200": _HOPPER,
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA A100-SXM4-40GB": _AMPERE,
    "NVIDIA A100-SXM4-80GB": _AMPERE,
    "Tesla V100-SXM2-16GB": {"fp32": 15.7e12, "fp16": 125e12},
    "Tesla V100-SXM2-32GB": {"fp32": 15.7e12, "fp16": 125e12},
}


def peak_flops_per_second(device_name: str, precision: str) -> float | None:
    """Returns the peak of a device in its data sheet, in operations a second; None if the device is not listed."""
    return _PEAKS.get(device_name, {}).get(precision)


def training_flops_per_token(
    *, num_layers: int, hidden_size: int, intermediate_size: int, sequence_length: float
) -> float:
    """Returns the operations of one forward and backward pass of a Transformer encoder for each token.

    Each weight of a matrix product takes six operations (two forward, four backward). Each layer has four square
    matrices of attention and two of the feed-forward layer. Attention itself adds 12 operations for each layer, hidden
    unit and token attended to. Embeddings take none, and those of the classifier, one token a sample, are left out.
    All layers count whole, as is usual for model FLOPs utilization (Chowdhery et al. 2022, appendix B,
    https://arxiv.org/abs/2204.02311), although most of the last one is not computed where samples are packed
    (tasks/text/packing.py).
    """
    weights = num_layers * (4 * hidden_size**2 + 2 * hidden_size * intermediate_size)
    return 6 * weights + 12 * num_layers * hidden_size * sequence_length


def model_flops_per_second(record: RunRecord) -> float | None:
    """Returns the operations a second of all ranks together, without warm-up; None if the record does not tell.

    The length of the texts enters as their mean, which is exact if all texts have the same length.
    """
    shape = record.task.get("model_shape")
    seconds = training_seconds(record)
    if shape is None or not seconds:
        return None
    tokens = sum(sum(rank.tokens[NUM_WARMUP_STEPS:]) for rank in record.ranks)
    samples = sum(sum(rank.samples[NUM_WARMUP_STEPS:]) for rank in record.ranks)
    return tokens * training_flops_per_token(**shape, sequence_length=tokens / samples) / seconds
