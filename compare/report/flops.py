"""How many floating-point operations training takes, and what share of a device's peak that is (MFU).

MFU is defined in the PaLM paper, appendix B (https://arxiv.org/abs/2204.02311): the operations that
the model needs, whatever a program computes beyond them, over what the device could have done.
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
    """The data sheet's peak of a device with this name, None where it is not listed."""
    return _PEAKS.get(device_name, {}).get(precision)


def training_flops_per_token(
    *, num_layers: int, hidden_size: int, intermediate_size: int, sequence_length: float
) -> float:
    """Operations of one forward and backward pass of a Transformer encoder, for each token.

    Six for each weight of a matrix product (two forward, four backward): four square matrices of
    attention and two of the feed-forward layer. Attention itself adds 12 for each layer, hidden unit
    and token attended to. Embeddings are looked up, and the classifier sees one token a sample.
    """
    weights = num_layers * (4 * hidden_size**2 + 2 * hidden_size * intermediate_size)
    return 6 * weights + 12 * num_layers * hidden_size * sequence_length


def model_flops_per_second(record: RunRecord) -> float | None:
    """What all ranks together computed of the model, warm-up left out; None where the record does not say.

    The length of the texts enters as its mean, which is exact where all have the same.
    """
    shape = record.task.get("model_shape")
    seconds = training_seconds(record)
    if shape is None or not seconds:
        return None
    tokens = sum(sum(rank.tokens[NUM_WARMUP_STEPS:]) for rank in record.ranks)
    samples = sum(sum(rank.samples[NUM_WARMUP_STEPS:]) for rank in record.ranks)
    return tokens * training_flops_per_token(**shape, sequence_length=tokens / samples) / seconds
