"""The options of the engine for Kubernetes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from typing_extensions import override

from engines.interface import EngineSettings

_BYTES = {"M": 10**6, "G": 10**9, "T": 10**12, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Python and torch alone take about so much, and no machine has more than the most.
_LEAST_MEMORY, _MOST_MEMORY = 256 * 2**20, 2**50


def _image(value: str) -> str:
    if re.fullmatch(r"[a-zA-Z0-9][\w.:/@-]*", value, re.ASCII) is None:
        raise ValueError("is not the name of an image; write it as registry/name:tag")
    return value


def _memory(value: str) -> str:
    found = re.fullmatch(rf"(\d+)({'|'.join(_BYTES)})", value, re.ASCII)
    if found is None:
        raise ValueError("is not an amount of memory; write it as 512Mi or 8Gi")
    if not _LEAST_MEMORY <= int(found[1]) * _BYTES[found[2]] <= _MOST_MEMORY:
        raise ValueError("no node trains with that; choose between 256Mi and 1024Ti")
    return value


def _label(value: str) -> str:
    if len(value) > 63 or re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", value) is None:
        raise ValueError("is no such name in Kubernetes; use at most 63 small letters, digits and -")
    return value


def _subdomain(value: str) -> str:
    parts = value.split(".")
    if len(value) > 253 or any(re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", part) is None for part in parts):
        raise ValueError("is no such name in Kubernetes; use small letters, digits, - and .")
    return value


class KubernetesSettings(EngineSettings):
    """What the pods of a job are like."""

    kind: Literal["indexed-job", "train-job", "mpi-job"] = Field(
        "indexed-job",
        description="what the cluster is given: a Job of Kubernetes itself, a TrainJob of Kubeflow Trainer, or an "
        "MPIJob of the MPI operator",
    )
    image: Annotated[str, AfterValidator(_image)] | None = Field(
        None, description="image of the backend, which the cluster can pull"
    )
    namespace: Annotated[str, AfterValidator(_label)] | None = Field(
        None, description="where the job is created (default: that of kubectl's context)"
    )
    volume_claim: Annotated[str, AfterValidator(_subdomain)] | None = Field(
        None, description="PersistentVolumeClaim that receives the results (default: they are lost with the pods)"
    )
    cpus: int | None = Field(
        None, ge=1, le=4096, description="cores of each node (default: one for each thread of its ranks)"
    )
    memory: Annotated[str, AfterValidator(_memory)] | None = Field(
        None,
        description="memory of each node, such as 512Mi or 8Gi (default: 2Gi for each rank)",
        json_schema_extra={"metavar": "SIZE"},
    )
    gpus: int | None = Field(
        None,
        ge=1,
        le=64,
        description="GPUs of each node (default: one for each rank with --device cuda, and for a backend that computes "
        "on GPUs only; else none)",
    )

    @property
    @override
    def num_gpus(self) -> int:
        return self.gpus or 0

    @property
    @override
    def num_cpus(self) -> int | None:
        return self.cpus
