"""What kubectl is asked for, and how its answers are read."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.command import planned
from engines.kubectl import Copying, Kubectl, Logs, Pod, _pod
from tests.launching import require_module, wait_until


def test_the_service_is_removed_with_its_job() -> None:
    """By the cluster, since the command that created both may have been killed."""
    validate = require_module("kubernetes_validate").validate
    created: list[list[Mapping[str, Any]]] = []

    class Noting(Kubectl):
        def _ask(self, *words: str, manifests: Sequence[Mapping[str, Any]] | None = None) -> str:
            created.append([*(manifests or [])])
            return "number-1"

    engine, _ = planned(["ddp", "--engine", "kubernetes", "--image", "registry/lockstep-ddp:1"])
    service, job = engine._manifests
    Noting(None).create([service, job])
    name = job["metadata"]["name"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": "number-1", "blockOwnerDeletion": False}
    assert created == [[job], [{**service, "metadata": {**service["metadata"], "ownerReferences": [owner]}}]]
    validate(created[1][0], "1.37", strict=True)
    created.clear()
    Noting(None).create([job])
    assert created == [[job]]


def _item(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    metadata = {"name": "a", "labels": more.pop("labels", {}), "annotations": more.pop("annotations", {})}
    return {"metadata": metadata, "status": {"containerStatuses": [{"state": state, **more}]}}


def test_how_a_pod_is() -> None:
    """As the reference of the API describes the status of a pod."""
    index = {"batch.kubernetes.io/job-completion-index": "3"}
    running = _pod(_item({"running": {}}, annotations=index))
    assert (running.index, running.has_started, running.code, running.trouble) == (3, True, None, None)
    killed = _pod(_item({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}))
    assert (killed.index, killed.code, killed.trouble) == (0, 137, "OOMKilled")
    waiting = _pod(_item({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}))
    assert (waiting.has_started, waiting.trouble) == (False, "ImagePullBackOff: no such image")
    again = _pod(_item({"running": {}}, lastState={"terminated": {"exitCode": 1, "reason": "Error"}}))
    assert again.code == 1
    assert _pod(_item({"running": {}}, labels={"training.kubeflow.org/job-role": "worker"})).index is None
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    pending = _pod({"metadata": {"name": "a", "labels": {}}, "status": {"conditions": [unscheduled]}})
    assert (pending.has_started, pending.trouble) == (False, "Unschedulable: 0/3 nodes")


def test_a_log_that_ends_before_its_pod_is_copied_again(tmp_path: Path) -> None:
    begun: list[str] = []

    class Ending(Kubectl):
        def start_logs(self, pod: str, path: Path) -> Copying:
            begun.append(pod)
            process = subprocess.Popen(["true"])
            process.wait()
            return Copying(process, io.BytesIO())

    pod = Pod("a", 0, has_started=True, code=None, trouble=None)
    with Logs(Ending(None), [tmp_path / "log"]) as logs:
        logs.follow(pod)
        logs.follow(pod)
        assert begun == ["a", "a"]
        logs.follow(replace(pod, code=0))
        assert begun == ["a", "a"]


def test_what_keeps_a_log_from_being_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho 'E1124 19:20:40.032131 of its own' >&2\necho 'no such host' >&2\nexit 1\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pod = Pod("a", 0, has_started=True, code=None, trouble=None)
    with Logs(Kubectl(None), [tmp_path / "log"]) as logs:
        assert logs.follow(pod) is None
        assert wait_until(lambda: logs.follow(pod), "an answer of kubectl") == "no such host"
        ended = replace(pod, code=1)
        wait_until(lambda: logs.follow(ended), "another answer")
        assert logs.finish() == {"a": "no such host"}
        gone = replace(pod, has_started=False)
        for _ in range(3):
            logs.follow(gone)
