"""An MPIJob in its image: Docker does what the MPI operator and the kubelet would do with the manifest.

The operator is not here. What it adds to the pods of a job is written here after its sources (kubeflow/mpi-operator
0.8.2, pkg/controller/mpi_job_controller.go): names, keys, the host file and variables.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.starters.interface import PROJECT_DIRECTORY
from tests.launching import lockstep, require_backend, train
from tests.standin_kubectl import expanded

pytestmark = pytest.mark.docker

IMAGE = "lockstep/horovod-mpi:0.1.0"
DOCKERFILE = PROJECT_DIRECTORY / "docker" / "horovod" / "mpi-operator.Dockerfile"
NAMESPACE = "default"
OPTIONS = ("--task", "token-tagging", "--max-steps", "10", "--threads-per-rank", "1", "--num-processes", "2")
HOST_FILE = "/etc/mpi/hostfile"
VARIABLES = {
    "Worker": {"K_MPI_JOB_ROLE": "worker"},
    "Launcher": {
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": HOST_FILE,
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": "1",
        "NVIDIA_VISIBLE_DEVICES": "",
        "NVIDIA_DRIVER_CAPABILITIES": "",
    },
}
# What the manifest says of rights, and the same for Docker, whose seccomp profile is always its default.
RIGHTS = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
CONFINED = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


def _docker(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}  # as images.sh does where there is no buildx
    return subprocess.run(
        ["docker", *map(str, arguments)], capture_output=True, text=True, timeout=600, env=environment
    )


def _done(*arguments: str | Path) -> None:
    done = _docker(*arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


class Pods:
    """The pods of a job with the Secret, the ConfigMap and the volume that they mount, in a network of their own.

    Attributes:
        name: The name of the job.
        workers: The names of its workers.
        volume: What its volume for results holds.
    """

    def __init__(self, job: dict[str, Any], place: Path) -> None:
        self.name: str = job["metadata"]["name"]
        self._spec: dict[str, Any] = job["spec"]
        num_workers = self._spec["mpiReplicaSpecs"]["Worker"]["replicas"]
        self.workers = [f"{self.name}-worker-{number}" for number in range(num_workers)]
        self.volume, self._keys, self._host_file = place / "volume", place / "keys", place / "hostfile"
        self.volume.mkdir()
        os.chown(self.volume, 1000, 1000)
        slots = self._spec["slotsPerWorker"]
        lines = [f"{worker}.{self.name}.{NAMESPACE}.svc slots={slots}\n" for worker in self.workers]
        self._host_file.write_text("".join(lines))
        self._host_file.chmod(0o444)
        self._make_keys()

    def _make_keys(self) -> None:
        """One pair for users and hosts, with the owner and the modes that the kubelet gives a Secret."""
        self._keys.mkdir()
        keygen = ("ssh-keygen", IMAGE, "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", "/keys/id_rsa")
        _done("run", "--rm", "--user", "0:0", "--volume", f"{self._keys}:/keys", "--entrypoint", *keygen)
        shutil.copy(self._keys / "id_rsa.pub", self._keys / "authorized_keys")
        for path, mode in [*((path, 0o644) for path in self._keys.iterdir()), (self._keys, 0o3777)]:
            os.chown(path, 0, 1000)  # the group of the pod: fsGroup
            path.chmod(mode)

    def run(self, role: str, name: str, *how: str) -> subprocess.CompletedProcess[str]:
        """Runs the container of a pod: to its end, or in the background with --detach."""
        pod = self._spec["mpiReplicaSpecs"][role]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["securityContext"] == RIGHTS
        user, variables = pod["securityContext"], VARIABLES[role]
        options = ["--name", name, "--hostname", name, "--label", self.label, "--network", self.name]
        for domain in (self.name, f"{self.name}.{NAMESPACE}.svc"):
            options += ["--network-alias", f"{name}.{domain}"]
        options += [*CONFINED, "--user", f"{user['runAsUser']}:{user['runAsGroup']}", *self._mounts(role)]
        for variable, value in variables.items():
            options += ["--env", f"{variable}={value}"]
        words = [expanded(word, variables) for word in [*container["command"], *container["args"]]]
        return _docker("run", *how, *options, "--entrypoint", words[0], container["image"], *words[1:])

    def _mounts(self, role: str) -> list[str]:
        pod = self._spec["mpiReplicaSpecs"][role]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        options = ["--volume", f"{self._keys}:{self._spec['sshAuthMountPath']}:ro"]
        if role == "Launcher":
            options += ["--volume", f"{self._host_file}:{HOST_FILE}:ro"]
        for mount in pod["containers"][0]["volumeMounts"]:
            path, volume = mount["mountPath"], volumes[mount["name"]]
            if "persistentVolumeClaim" in volume:
                options += ["--volume", f"{self.volume}:{path}"]
            elif path == "/dev/shm":
                options += ["--shm-size", "1g"]
            else:
                options += ["--tmpfs", f"{path}:exec"]
        return options

    @property
    def label(self) -> str:
        """By which all of its containers are found."""
        return f"lockstep.job={self.name}"


@pytest.fixture(scope="module")
def image(images: dict[str, float]) -> str:
    """The image for the operator, on top of Horovod's; made first where need be, which takes some seconds."""
    _done("build", "--file", DOCKERFILE, "--tag", IMAGE, DOCKERFILE.parent)
    return IMAGE


@pytest.fixture
def pods(image: str, tmp_path: Path) -> Iterator[Pods]:
    """The pods of a job of two workers, whose manifest is what --dry-run prints; they are removed at the end."""
    engine = ("--engine", "kubernetes", "--kind", "mpi-job", "--num-nodes", "2", "--image", image)
    where = ("--volume-claim", "results", "--output-dir", tmp_path / "mine", "--dry-run")
    done = lockstep("horovod", *engine, *OPTIONS, *where)
    assert done.returncode == 0, done.stderr
    (job,) = yaml.safe_load_all(done.stdout)
    made = Pods(job, tmp_path)
    _done("network", "create", made.name)
    yield made
    left = _docker("ps", "--all", "--quiet", "--filter", f"label={made.label}").stdout.split()
    if left:
        _docker("rm", "--force", "--volumes", *left)
    _done("network", "rm", made.name)


def test_two_workers_compute_what_one_machine_does(pods: Pods, tmp_path: Path) -> None:
    require_backend("horovod")
    alone = train("horovod", tmp_path / "alone", *OPTIONS)
    for worker in pods.workers:
        started = pods.run("Worker", worker, "--detach")
        assert started.returncode == 0, started.stderr
    done = pods.run("Launcher", f"{pods.name}-launcher")
    of_workers = "\n".join(f"--- {worker}\n{_docker('logs', worker).stderr}" for worker in pods.workers)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{of_workers}"
    record = json.loads((pods.volume / "mine" / "node0" / "record.json").read_text())
    assert record["status"] == "completed"
    assert [rank["hostname"] for rank in record["ranks"]] == pods.workers
    assert [rank["weights_sha256"] for rank in record["ranks"]] == [rank["weights_sha256"] for rank in alone["ranks"]]
    assert [step["loss"] for step in record["steps"]] == [step["loss"] for step in alone["steps"]]
