"""A stand-in for kubectl and the cluster behind it: ``python standin_kubectl.py STATE ARGUMENTS OF KUBECTL``.

A real cluster is seldom there where the tests run (tests/kubernetes/cluster.sh starts one). So this stores the
objects that it is given, and runs the container of each pod as a process of this machine, from the manifest alone:
its command after the kubelet's replacement of $(NAME) and $$, its variables and no others but those that the operator
of a TrainJob adds, and its volume as a directory of STATE. All pods share the network of this machine, so their names
become 127.0.0.1. What it prints and the JSON of pods and jobs follow
https://kubernetes.io/docs/reference/kubernetes-api/. It does not schedule, and checks no field, user or quota.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

STATE = Path(sys.argv[1]) if __name__ == "__main__" else Path()
# The kinds of jobs whose pods are started; others are only stored.
KINDS = ("Job", "TrainJob")
# Of the job, of which there is one only.
UID = "a3c1f1b6-0b1f-4d8e-9a57-6f2f0c9d7e10"


def main(command: str, *arguments: str) -> int:
    """Does what one call of kubectl asks for."""
    operands = [word for word in arguments if not word.startswith("-")]
    if (STATE / "unreachable").exists():
        print("E1124 19:20:40.032131 1 memcache.go:265] no group list", file=sys.stderr)
        return refuse(
            "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
        )
    commands: dict[str, Callable[[], int]] = {
        "version": lambda: 0,
        "create": lambda: create(arguments),
        "get": lambda: get(*operands),
        "logs": lambda: logs(*operands),
        "delete": lambda: delete(signal.SIGKILL if "--now" in arguments else signal.SIGTERM),
        "_pod": lambda: run_pod(int(operands[0])),
    }
    return commands[command]()


def refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


def create(options: tuple[str, ...]) -> int:
    objects = list(yaml.safe_load_all(sys.stdin))
    if (STATE / "forbidden").exists():
        return refuse('Error from server (Forbidden): error when creating "STDIN": exceeded quota: pods=0')
    if "--dry-run=server" in options:
        return 0
    for one in objects:
        (STATE / f"{one['kind'].lower()}.json").write_text(json.dumps(one))
        if one["kind"] in KINDS:
            start_pods()
    if "--output=jsonpath={.metadata.uid}" in options:
        print(UID, end="")
    return 0


def start_pods() -> None:
    for index in range(num_pods()):
        command = [sys.executable, __file__, str(STATE), "_pod", str(index)]
        # A machine of a cluster inherits nothing from the user's.
        environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": "/tmp"}
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip


def run_pod(index: int) -> int:
    container, given, address = node_of(the_job(), index)
    variables = {one["name"]: one["value"] for one in container.get("env", [])} | given
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    words = [expanded(word, variables) for word in [*container["command"], *container.get("args", [])]]
    words = [word.replace(mounts["results"] + "/", f"{STATE}/volume/") for word in words]
    words = [word.replace(address, "127.0.0.1") for word in words]
    variables = {name: value.replace(address, "127.0.0.1") for name, value in variables.items()}
    with (STATE / f"pod{index}.log").open("wb") as log:
        process = subprocess.Popen(words, env={**os.environ, **variables}, stdout=log, stderr=log, cwd="/")
    (STATE / f"pod{index}.pid").write_text(str(process.pid))
    code = process.wait()
    (STATE / f"pod{index}.exit").write_text(str(128 - code if code < 0 else code))
    return 0


def the_job() -> dict[str, Any]:
    (path,) = [path for kind in KINDS if (path := STATE / f"{kind.lower()}.json").exists()]
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def num_pods() -> int:
    job = the_job()
    return int(job["spec"]["completions"] if job["kind"] == "Job" else job["spec"]["trainer"]["numNodes"])


def node_of(job: dict[str, Any], index: int) -> tuple[dict[str, Any], dict[str, str], str]:
    """The container of a pod, the variables that it is given besides its own, and the name of the first pod."""
    name, spec = job["metadata"]["name"], job["spec"]
    if job["kind"] == "Job":
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        return container, {"JOB_COMPLETION_INDEX": str(index)}, f"{name}-0.{pod.get('subdomain')}"
    # Kubeflow Trainer puts the command and what torchrun reads into the container of its runtime, which is patched:
    # https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go
    trainer = spec["trainer"]
    (patch,) = spec["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    address = f"{name}-node-0-0.{name}"
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": "29500",
    }
    return {**container, "command": trainer["command"]}, variables, address


def expanded(word: str, variables: dict[str, str]) -> str:
    """What the kubelet makes of a word: third_party/forked/golang/expansion/expand.go."""

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[1] is None else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, word)


def get(kind: str, name: str = "") -> int:
    if kind == "persistentvolumeclaim":
        found = name == "results"
        return 0 if found else refuse(f'Error from server (NotFound): persistentvolumeclaims "{name}" not found')
    if kind == "pods":
        print(json.dumps({"items": [] if are_gone() else [pod_of(index) for index in range(num_pods())]}))
        return 0
    if are_gone():
        return refuse(f'Error from server (NotFound): {kind} "{name}" not found')
    codes = [code_of(index) for index in range(num_pods())]
    ends = [{"type": "Failed" if any(codes) else "Complete", "status": "True"}] if None not in codes else []
    print(json.dumps({"status": {"conditions": ends}}))
    return 0


def code_of(index: int) -> int | None:
    path = STATE / f"pod{index}.exit"
    return int(path.read_text()) if path.exists() and path.read_text() else None


def pod_of(index: int) -> dict[str, Any]:
    code = code_of(index)
    state: dict[str, Any] = {"running": {}}
    status: dict[str, Any] = {}
    if code is not None:
        state = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
    elif not (STATE / f"pod{index}.pid").exists():
        state = {"waiting": {"reason": "ContainerCreating"}}
    status["containerStatuses"] = [{"name": "lockstep", "state": state}]
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    return {"metadata": {"name": f"pod{index}", "annotations": annotations, "labels": {}}, "status": status}


def are_gone() -> bool:
    """A job that is deleted in the foreground goes after its pods, which go some time after they have ended."""
    ends = [STATE / f"pod{index}.exit" for index in range(num_pods())]
    if not (STATE / "deleted").exists():
        return False
    return all(path.exists() and time.time() - path.stat().st_mtime > 30 for path in ends)


def delete(number: signal.Signals) -> int:
    (STATE / "deleted").touch()
    for path in STATE.glob("pod*.pid"):
        if not path.with_suffix(".exit").exists():
            os.kill(int(path.read_text()), number)
    return 0


def logs(name: str) -> int:
    path = STATE / f"{name}.log"
    with path.open("rb") as file:
        while True:
            has_ended = path.with_suffix(".exit").exists()
            sys.stdout.buffer.write(file.read())
            sys.stdout.buffer.flush()
            if has_ended:
                return 0
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[2:]))
