"""The objects that Kubernetes is given for a job, as plain mappings, and nothing that talks to a cluster."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.interface import NodeJob
from engines.kubernetes_settings import KubernetesSettings

Manifest = dict[str, Any]

# Where the images of docker/ keep results, and the user that they run as.
VOLUME = Path("/runs")
_USER = 1000
# What a pod is found by.
INSTANCE_LABEL = "app.kubernetes.io/instance"
_GIBIBYTES_OF_A_RANK = 2
_SECONDS_TO_SAVE = 60
# A job whose command was killed, or that was created by hand, is deleted so long after its end; until then, its pods
# can be asked what they printed.
_SECONDS_KEPT = 24 * 3600
# The runtime that Kubeflow Trainer brings for torch, and its name for the job and the container of the nodes.
_TORCH_RUNTIME = "torch-distributed"
_TRAINER_NODE = "node"
# Where the MPI operator's own images keep the keys and the configuration of sshd.
_MPI_HOME = "/home/mpiuser"
# What mpirun passes on of the variables of the image.
_PASSED_ON = ("PATH", "HOME", "LOCKSTEP_CACHE", "LOCKSTEP_REVISION")
# What mpirun itself needs, which computes nothing.
_OF_MPIRUN = {"cpu": "1", "memory": "1Gi"}


def compose(job: NodeJob, settings: KubernetesSettings, name: str) -> list[Manifest]:
    """Returns the objects of a job: first what belongs to it, and then the job itself.

    Args:
        job: The job.
        settings: The options of the engine.
        name: The name of the objects: a label of RFC 1123.
    """
    forms = {"indexed-job": _indexed_job, "train-job": _train_job, "mpi-job": _mpi_job}
    return forms[settings.kind](_in_a_pod(job, settings), settings, name)


def _in_a_pod(job: NodeJob, settings: KubernetesSettings) -> NodeJob:
    """Returns the job with the paths and the interpreter of the image."""
    # A container sees all cores of its machine, of which it may use those of its limit.
    cpus = _cpus(job, settings)
    threads = job.run.threads_per_rank or max(1, cpus // job.num_local_processes)
    return replace(
        job,
        options=(*job.options, f"--threads-per-rank={threads}"),
        output_dir=VOLUME / job.output_dir.name,
        program=("python", *job.program[1:]),
    )


def _indexed_job(job: NodeJob, settings: KubernetesSettings, name: str) -> list[Manifest]:
    """A Job with an index for each pod, and the Service that gives pods names, for which they wait.

    https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
    """
    metadata = _metadata(job, settings, name)
    address = f"{name}-0.{name}"
    pod = {
        **_pod(job, settings),
        "restartPolicy": "Never",
        "subdomain": name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # What a rank leaves behind is then reaped, and signals arrive before Python has installed its handlers.
        "shareProcessNamespace": True,
        "containers": [
            {
                **_container(settings),
                "resources": _resources(job, settings),
                **_shell(_node_line(job, "$JOB_COMPLETION_INDEX", address)),
            }
        ],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "selector": {INSTANCE_LABEL: name},
            # The nodes meet before any of them is ready.
            "publishNotReadyAddresses": True,
        },
    }
    whole = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": job.num_nodes,
            "parallelism": job.num_nodes,
            # A pod that started again would find the others gone. They are left to end by themselves, for when a
            # whole Job fails, Kubernetes deletes what still runs, and with it why it failed.
            "backoffLimitPerIndex": 0,
            "ttlSecondsAfterFinished": _SECONDS_KEPT,
            # No second pod writes where the first one still saves.
            "podReplacementPolicy": "Failed",
            "template": {"metadata": {"labels": metadata["labels"]}, "spec": pod},
        },
    }
    return [service, whole] if job.num_nodes > 1 else [whole]


def _train_job(job: NodeJob, settings: KubernetesSettings, name: str) -> list[Manifest]:
    """A TrainJob of Kubeflow Trainer, whose runtime brings pods with an index and the Service.

    https://www.kubeflow.org/docs/components/trainer/
    """
    metadata = _metadata(job, settings, name)
    patch = {
        "name": _TRAINER_NODE,
        "template": {
            "spec": {
                "template": {
                    "metadata": {"labels": metadata["labels"]},
                    "spec": {
                        **_pod(job, settings),
                        "containers": [{**_confinement(), "name": _TRAINER_NODE}],
                    },
                }
            }
        },
    }
    spec = {
        "runtimeRef": {"name": _TORCH_RUNTIME},
        "trainer": {
            "image": settings.image,
            "numNodes": job.num_nodes,
            "numProcPerNode": job.num_local_processes,
            "resourcesPerNode": _resources(job, settings),
            **_shell(_node_line(job, "$PET_NODE_RANK", "$PET_MASTER_ADDR")),
        },
        "runtimePatches": [
            {
                "manager": "lockstep.dev/engine",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
            }
        ],
    }
    return [{"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}]


def _mpi_job(job: NodeJob, settings: KubernetesSettings, name: str) -> list[Manifest]:
    """An MPIJob of the MPI operator: sshd in each pod, and one more pod whose mpirun starts the nodes' commands there.

    https://github.com/kubeflow/mpi-operator
    """
    metadata = _metadata(job, settings, name)
    workers = [f"{name}-worker-{number}.{name}" for number in range(job.num_nodes)]
    passed_on = [word for variable in _PASSED_ON for word in ("-x", variable)]
    line = _node_line(job, "$OMPI_COMM_WORLD_RANK", workers[0])
    mpirun = ["mpirun", "-np", str(job.num_nodes), "--map-by", "ppr:1:node", "--bind-to", "none", *passed_on]

    def replica(number: int, resources: Manifest, command: Manifest) -> Manifest:
        container = {**_container(settings), "resources": resources, **command}
        spec = {**_pod(job, settings), "automountServiceAccountToken": False, "containers": [container]}
        return {
            "replicas": number,
            "restartPolicy": "Never",
            "template": {"metadata": {"labels": metadata["labels"]}, "spec": spec},
        }

    sshd = ["-De", "-f", f"{_MPI_HOME}/.sshd_config", "-o", "PidFile=none"]
    launcher = {
        "command": ["sh", "-c", _wait_for(workers, job) + 'exec "$@"', "sh"],
        "args": _literally([*mpirun, "sh", "-c", line]),
    }
    spec = {
        "slotsPerWorker": 1,
        "sshAuthMountPath": f"{_MPI_HOME}/.ssh",
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "Running", "ttlSecondsAfterFinished": _SECONDS_KEPT},
        "mpiReplicaSpecs": {
            "Launcher": replica(1, {"requests": _OF_MPIRUN, "limits": _OF_MPIRUN}, launcher),
            "Worker": replica(job.num_nodes, _resources(job, settings), {"command": ["/usr/sbin/sshd"], "args": sshd}),
        },
    }
    return [{"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": metadata, "spec": spec}]


def _metadata(job: NodeJob, settings: KubernetesSettings, name: str) -> Manifest:
    labels = {
        "app.kubernetes.io/name": "lockstep",
        "app.kubernetes.io/component": slug(job.backend),
        INSTANCE_LABEL: name,
    }
    namespace = {} if settings.namespace is None else {"namespace": settings.namespace}
    return {"name": name, **namespace, "labels": labels}


def slug(text: str) -> str:
    """Writes a name with the characters of RFC 1123 only, and at most 12 of them."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:12].strip("-")


def _pod(job: NodeJob, settings: KubernetesSettings) -> Manifest:
    """Returns what pods of all kinds of jobs have: volumes, their user, and the time to save a checkpoint."""
    results: Manifest = {"emptyDir": {}}
    if settings.volume_claim is not None:
        results = {"persistentVolumeClaim": {"claimName": settings.volume_claim}}
    return {
        # A rank that hangs is noticed first; then the others save.
        "terminationGracePeriodSeconds": math.ceil(job.run.hang_timeout) + _SECONDS_TO_SAVE,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            {"name": "results", **results},
            # Ranks and data loaders exchange tensors there; without it, a container has 64 MiB. It counts as memory.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            {"name": "temporary", "emptyDir": {}},
        ],
    }


def _container(settings: KubernetesSettings) -> Manifest:
    return {"name": "lockstep", "image": settings.image, **_confinement()}


def _confinement() -> Manifest:
    """Returns what a container may do and write: as in docker/compose.yaml, and less than the restricted standard.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/
    """
    return {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "results", "mountPath": str(VOLUME)},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "temporary", "mountPath": "/tmp"},
        ],
    }


def _resources(job: NodeJob, settings: KubernetesSettings) -> Manifest:
    """Returns the resources of a node; requests are limits, so that a pod is the last to be evicted."""
    memory = settings.memory or f"{_GIBIBYTES_OF_A_RANK * job.num_local_processes}Gi"
    amounts = {"cpu": str(_cpus(job, settings)), "memory": memory}
    gpus = settings.gpus or (job.num_local_processes if job.device == "cuda" else 0)
    if gpus:
        amounts["nvidia.com/gpu"] = str(gpus)
    return {"requests": amounts, "limits": amounts}


def _cpus(job: NodeJob, settings: KubernetesSettings) -> int:
    return settings.cpus or (job.run.threads_per_rank or 1) * job.num_local_processes


def _node_line(job: NodeJob, node_rank: str, master_addr: str) -> str:
    """Returns the command of a node as a line for a shell."""
    wait = _wait_for([master_addr], job) if job.num_nodes > 1 else ""
    return f"{wait}exec {job.shell_line(node_rank, master_addr)}"


def _wait_for(hosts: list[str], job: NodeJob) -> str:
    """Returns a line that waits until the names of pods are known, as long as nodes wait for each other.

    The name of a pod is known some seconds after it has started, and the pods start at different times.
    """
    seconds = math.ceil(job.run.timeout)
    loop = 'for host; do until getent ahostsv4 "$host"; do sleep 1; done; done'
    names = " ".join(f'"{host}"' for host in hosts)
    return f"timeout {seconds} sh -c '{loop}' sh {names} >/dev/null; "


def _shell(line: str) -> dict[str, list[str]]:
    return {"command": ["sh", "-c", *_literally([line])]}


def _literally(words: list[str]) -> list[str]:
    """Writes words so that the kubelet, which replaces $(NAME) and $$, leaves them as they are.

    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
    """
    return [re.sub(r"\$(?=[$(])", "$$", word) for word in words]
