"""What Kubernetes is given for a job, and how kubectl starts, follows and ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.command import planned
from tests.launching import free_port, lockstep, require_module, start_lockstep, train, trains, wait_until
from tests.standin_kubectl import UID, expanded

IMAGE = ("--engine", "kubernetes", "--image", "registry/lockstep-ddp:1")


def _dry_run(*arguments: str) -> list[dict[str, Any]]:
    done = lockstep(*arguments, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert ("are lost with the pods" in done.stderr) == ("--volume-claim" not in arguments)
    return list(yaml.safe_load_all(done.stdout))


# One job with few options, and one with all.
JOBS = {
    "plain": (),
    "whole": (
        *("--num-nodes", "4", "--num-processes", "8", "--volume-claim", "results", "--namespace", "team"),
        *("--cpus", "6", "--memory", "24Gi", "--device", "cuda", "--output-dir", "runs/mine"),
    ),
    "alone": ("--num-nodes", "1"),
}


@pytest.mark.parametrize("version", ["1.33", "1.37"])
@pytest.mark.parametrize("case", JOBS)
def test_the_cluster_knows_every_field(case: str, version: str) -> None:
    """By the schemas of Kubernetes, of which the strict ones refuse what they do not know."""
    validate = require_module("kubernetes_validate").validate
    objects = _dry_run("ddp", *IMAGE, *JOBS[case])
    assert [one["kind"] for one in objects] == (["Job"] if case == "alone" else ["Service", "Job"])
    for one in objects:
        validate(one, version, strict=True)
    assert objects[-1]["spec"]["ttlSecondsAfterFinished"] == 24 * 3600
    objects[-1]["spec"]["template"]["spec"]["restart"] = "Never"
    with pytest.raises(Exception, match="Additional properties are not allowed"):
        validate(objects[-1], version, strict=True)


def test_a_train_job_has_no_field_that_its_model_lacks() -> None:
    """The models of Kubeflow Trainer drop what they do not know, so what they write is compared with what they read."""
    models = require_module("kubeflow_trainer_api.models")
    (job,) = _dry_run("ddp", *IMAGE, *JOBS["whole"], "--kind", "train-job")
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert job["spec"]["trainer"]["numNodes"] == 4
    assert job["spec"]["trainer"]["numProcPerNode"] == 2
    job["spec"]["trainer"]["nodes"] = 4
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() != job


# The fields of v2beta1 that have no part of a Pod below them.
MPI_FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {
        *("slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath"),
        *("launcherCreationPolicy", "mpiImplementation"),
    },
    "runPolicy": {
        *("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy"),
        *("suspend", "managedBy"),
    },
    "mpiReplicaSpecs": {"Launcher", "Worker"},
    "replica": {"replicas", "template", "restartPolicy"},
}


def test_an_mpi_job_has_only_fields_of_its_api() -> None:
    """By the fields of types.go (kubeflow/mpi-operator), and for its pods by the schema of Kubernetes."""
    validate = require_module("kubernetes_validate").validate
    (job,) = _dry_run("horovod", *IMAGE, "--num-nodes", "4", "--kind", "mpi-job", "--namespace", "team")
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert job.keys() <= MPI_FIELDS[""]
    assert spec.keys() <= MPI_FIELDS["spec"]
    assert spec["runPolicy"].keys() <= MPI_FIELDS["runPolicy"]
    assert spec["mpiReplicaSpecs"].keys() == MPI_FIELDS["mpiReplicaSpecs"]
    for replica in spec["mpiReplicaSpecs"].values():
        assert replica.keys() <= MPI_FIELDS["replica"]
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": replica["template"]}
        validate(template, "1.33", strict=True)
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 4
    launcher = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["args"][:3] == ["mpirun", "-np", "4"]
    assert '--node-rank="$OMPI_COMM_WORLD_RANK"' in launcher["args"][-1]


def _pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The specifications of all pods in objects: whatever has containers."""
    found = []
    left: list[Any] = [*objects]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            found += [one] if "containers" in one else []
            left += one.values()
        elif isinstance(one, list):
            left += one
    return found


@pytest.mark.parametrize(("backend", "kind"), [("ddp", "indexed-job"), ("ddp", "train-job"), ("horovod", "mpi-job")])
def test_pods_have_no_more_rights_than_they_need(backend: str, kind: str) -> None:
    """The rules of https://kubernetes.io/docs/concepts/security/pod-security-standards/ (restricted)."""
    pods = _pods(_dry_run(backend, *IMAGE, "--kind", kind, "--hang-timeout", "100", "--volume-claim", "results"))
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all({"emptyDir", "persistentVolumeClaim"} & volume.keys() for volume in pod["volumes"])
        assert pod["terminationGracePeriodSeconds"] > 100
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            volumes = {volume.pop("name"): volume for volume in json.loads(json.dumps(pod["volumes"]))}
            assert volumes[mounts["/dev/shm"]] == {"emptyDir": {"medium": "Memory"}}
            assert volumes[mounts["/runs"]] == {"persistentVolumeClaim": {"claimName": "results"}}


def test_the_pods_find_each_other() -> None:
    service, job = _dry_run("ddp", *IMAGE, *JOBS["whole"])
    name = job["metadata"]["name"]
    assert re.fullmatch(r"lockstep-ddp-\d{8}-\d{6}-[0-9a-f]{4}", name)
    template = job["spec"]["template"]
    # The name of a pod is INDEX below the Service that its subdomain names and that selects it.
    assert service["metadata"]["name"] == template["spec"]["subdomain"] == name
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert service["metadata"]["namespace"] == job["metadata"]["namespace"] == "team"
    (container,) = template["spec"]["containers"]
    assert f'--master-addr="{name}-0.{name}"' in container["command"][-1]
    assert '--output-dir=/runs/mine/node"$JOB_COMPLETION_INDEX"' in container["command"][-1]
    amounts = {"cpu": "6", "memory": "24Gi", "nvidia.com/gpu": "2"}
    assert container["resources"] == {"requests": amounts, "limits": amounts}
    # Two ranks share six cores; a container sees all cores of its machine.
    assert "--threads-per-rank=3" in container["command"][-1]


@pytest.mark.parametrize(
    ("words", "cpu", "gpus"), [("ddp --threads-per-rank 3", "6", None), ("ddp --cpus 4", "4", None), ("apex", "2", "2")]
)
def test_what_a_node_of_two_ranks_gets(words: str, cpu: str, gpus: str | None) -> None:
    engine, _ = planned([*words.split(), *IMAGE, "--num-processes", "4"])
    (container,) = engine._manifests[-1]["spec"]["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert (limits["cpu"], limits.get("nvidia.com/gpu")) == (cpu, gpus)


@pytest.mark.parametrize("text", ["$(JOB_COMPLETION_INDEX)", "$$(HOME)", "$$", "a$$$(b", "$HOME", "a \"b\" 'c'"])
def test_the_kubelet_leaves_an_option_as_it_is(text: str) -> None:
    objects = _dry_run("ddp", *IMAGE, "--validation-file", "/runs/a.csv", "--train-file", text)
    (container,) = objects[-1]["spec"]["template"]["spec"]["containers"]
    line = expanded(container["command"][-1], {"JOB_COMPLETION_INDEX": "1", "HOME": "/tmp"})
    # A shell reads the line; what it would execute is printed instead.
    line = re.sub(r"^timeout .*?; exec python", "printf '%s\\\\n'", line)
    done = subprocess.run(["sh", "-c", line], env={"JOB_COMPLETION_INDEX": "1"}, capture_output=True, text=True)
    words = done.stdout.splitlines()
    assert words[words.index("--train-file") + 1] == text
    assert "--node-rank=1" in words


REFUSALS = {
    "no-image": ("ddp --engine kubernetes", "--image", "ddp"),
    "image": ("ddp --engine kubernetes --image=-x", "--image -x", "registry/name:tag"),
    "claim": ("ddp {} --volume-claim My_Claim", "--volume-claim My_Claim", "small letters"),
    "namespace": ("ddp {} --namespace a.b", "--namespace a.b", "small letters"),
    "no-unit": ("ddp {} --memory 8", "--memory 8", "8Gi"),
    "bytes": ("ddp {} --memory 8GB", "--memory 8GB", "8Gi"),
    "thousandths": ("ddp {} --memory 100m", "--memory 100m", "8Gi"),
    "little": ("ddp {} --memory 8Mi", "--memory 8Mi", "256Mi"),
    "much": ("ddp {} --memory 5000Ti", "--memory 5000Ti", "1024Ti"),
    "cpus": ("ddp {} --cpus 0", "--cpus 0", "greater than"),
    "gpus": ("ddp {} --gpus 2 --device cpu", "--gpus 2", "--device cpu"),
    "kind": ("ddp {} --kind cron-job", "--kind cron-job", "indexed-job"),
    "train-job": ("horovod {} --kind train-job", "--kind train-job", "--kind indexed-job"),
    "mpi-job": ("ddp {} --kind mpi-job", "--kind mpi-job", "--kind indexed-job"),
    "place": ("ddp {} --output-dir runs/a$b", "--output-dir", "letters"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(tmp_path: Path, case: str) -> None:
    arguments, *words = REFUSALS[case]
    done = lockstep(*arguments.format(" ".join(IMAGE)).split(), "--dry-run", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not [*tmp_path.iterdir()]


def test_an_option_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("max_steps: 3\n")
    done = lockstep("ddp", *IMAGE, "--config", tmp_path / "options.yaml", "--dry-run")
    assert done.returncode == 2
    assert "--config: the pods cannot read" in done.stderr


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of the stand-in for a cluster, whose kubectl comes first on PATH."""
    state = tmp_path / "cluster"
    (tmp_path / "bin").mkdir()
    (state / "volume").mkdir(parents=True)
    kubectl = tmp_path / "bin" / "kubectl"
    script = Path(__file__).with_name("standin_kubectl.py")
    kubectl.write_text(f'#!/bin/sh\nexec {sys.executable} {script} {state} "$@"\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{kubectl.parent}{os.pathsep}{os.environ['PATH']}")
    return state


def _job(*options: str, task: str = "token-tagging", steps: int = 10) -> tuple[str, ...]:
    pods = (*IMAGE, "--volume-claim", "results", "--master-port", free_port())
    return ("ddp", *pods, "--task", task, "--max-steps", str(steps), "--threads-per-rank", "1", *options)


# The jobs whose pods the stand-in for kubectl runs.
RUNNING = ["indexed-job", "train-job"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", RUNNING)
def test_two_pods_compute_what_one_machine_does(tmp_path: Path, cluster: Path, kind: str) -> None:
    """With the stand-in for kubectl, which runs what the manifests say as processes of this machine."""
    alone = train(
        *("ddp", tmp_path / "alone", "--task", "token-tagging", "--max-steps", "10", "--threads-per-rank", "1"),
        *("--num-processes", "2"),
    )
    done = lockstep(*_job("--kind", kind), "--output-dir", tmp_path / "mine")
    assert done.returncode == 0, done.stdout + done.stderr
    together = json.loads((cluster / "volume" / "mine" / "node0" / "record.json").read_text())
    assert [rank["weights_sha256"] for rank in together["ranks"]] == [rank["weights_sha256"] for rank in alone["ranks"]]
    assert "into the volume of results: mine/node*" in done.stdout
    assert "record" in (tmp_path / "mine" / "node0.log").read_text()
    assert done.stdout.startswith((tmp_path / "mine" / "node0.log").read_text().splitlines()[0])
    if kind == "indexed-job":  # the runtime of a TrainJob brings a Service of its own
        service = json.loads((cluster / "service.json").read_text())
        assert [owner["uid"] for owner in service["metadata"]["ownerReferences"]] == [UID]
    assert (cluster / "deleted").exists()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", RUNNING)
def test_a_pod_that_fails_gives_its_exit_code(tmp_path: Path, cluster: Path, kind: str) -> None:
    """With the stand-in for kubectl: the nodes refuse a file that they do not have; either may be seen first."""
    files = ("--train-file", "/runs/no.csv", "--validation-file", "/runs/no.csv")
    done = lockstep(*_job("--kind", kind, *files, task="text-classification"), "--output-dir", tmp_path / "mine")
    assert done.returncode == 2
    assert re.search(r"^lockstep: (node 1: )?--train-file \S*no\.csv", done.stderr, re.MULTILINE), done.stderr
    assert (cluster / "deleted").exists()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_refuses_its_options_ends_the_job(tmp_path: Path, cluster: Path, node: int) -> None:
    """With the stand-in for kubectl: a node finds a run in its directory; the other would wait for it five minutes."""
    (cluster / "volume" / "mine" / f"node{node}").mkdir(parents=True)
    (cluster / "volume" / "mine" / f"node{node}" / "record.json").write_text("{}")
    began = time.monotonic()
    done = lockstep(*_job(), "--output-dir", tmp_path / "mine")
    assert done.returncode == 2, done.stderr
    assert f"lockstep: {'node 1: ' * node}--output-dir " in done.stderr
    assert (cluster / "deleted").exists()
    assert time.monotonic() - began < 150


@pytest.mark.slow
@pytest.mark.processes
def test_a_signal_lets_the_pods_save_and_deletes_them(tmp_path: Path, cluster: Path) -> None:
    """With the stand-in for kubectl."""
    job = start_lockstep(*_job(steps=5000), "--output-dir", tmp_path / "mine")
    nodes = cluster / "volume" / "mine"
    wait_until(lambda: all(trains(nodes / f"node{node}") for node in (0, 1)), "the ranks of both nodes in training")
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 75, errors
    assert "continue with --resume" in errors
    assert [*(cluster / "volume" / "mine").glob("node*/checkpoints/*")]


@pytest.mark.slow
@pytest.mark.processes
def test_a_job_that_others_delete_saves_a_checkpoint(tmp_path: Path, cluster: Path) -> None:
    """With the stand-in for kubectl. Pods of a deleted job are asked to end, as those of one that Ctrl-C stops."""
    job = start_lockstep(*_job(steps=5000), "--output-dir", tmp_path / "mine")
    nodes = cluster / "volume" / "mine"
    wait_until(lambda: all(trains(nodes / f"node{node}") for node in (0, 1)), "the ranks of both nodes in training")
    subprocess.run(["kubectl", "delete", "jobs.batch", "the-job"], check=True)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 75, errors
    assert "continue with --resume" in errors
    assert [*nodes.glob("node*/checkpoints/*")]


UNREACHABLE = {
    "unreachable": ("unreachable", "", ("kubectl reaches no cluster", "was refused", "--dry-run")),
    "forbidden": ("forbidden", "", ("the cluster refuses the job", "exceeded quota")),
    "claim": ("", "other", ("--volume-claim other", "not found", "create it")),
}


@pytest.mark.parametrize("case", UNREACHABLE)
def test_what_the_cluster_refuses_creates_nothing(tmp_path: Path, cluster: Path, case: str) -> None:
    """With the stand-in for kubectl, whose messages are those that kubectl 1.33 prints."""
    mark, claim, words = UNREACHABLE[case]
    if mark:
        (cluster / mark).touch()
    done = lockstep("ddp", *IMAGE, "--volume-claim", claim or "results", "--output-dir", tmp_path / "mine")
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "memcache.go" not in done.stderr
    assert not (tmp_path / "mine").exists()
    assert not (cluster / "job.json").exists()


def test_kubectl_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = lockstep("ddp", *IMAGE, "--output-dir", tmp_path / "mine")
    assert done.returncode == 2
    assert "kubectl is not installed; install kubectl" in done.stderr
    assert not (tmp_path / "mine").exists()
