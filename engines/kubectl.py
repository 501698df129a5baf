"""What kubectl does for a job: it creates objects, says how pods are, copies what they print, and deletes all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, NamedTuple

import yaml
from typing_extensions import Self

from launch.errors import UsageError

_INDEX = "batch.kubernetes.io/job-completion-index"
_MPI_ROLE = "training.kubeflow.org/job-role"
_ENDS = ("Complete", "Succeeded", "Failed")
_GONE = "NotFound"
# What kubectl logs about itself begins so: E1124 19:20:40.032131.
_LOG_LINE = re.compile(r"[EWI]\d{4} ")
# For an answer, and for the rest of what a pod has printed.
_MOST_SECONDS = "20s"
_MOST_SECONDS_OF_LOGS = 30.0
_SECONDS_OF_RUNNING_PODS = 3.0


class Unanswered(RuntimeError):
    """The cluster does not answer, or kubectl could not ask it; the text is kubectl's, on one line."""


@dataclass(frozen=True)
class Pod:
    """How a pod is.

    Attributes:
        name: Its name.
        index: The number of its node; None where it only lends a place to what another pod starts.
        has_started: Whether it has printed anything, or may have.
        code: The exit code of its command; None while there is none.
        trouble: Why it does not start, or what ended it, if it was not its command that did.
    """

    name: str
    index: int | None
    has_started: bool
    code: int | None
    trouble: str | None


class Kubectl:
    """kubectl, with the user's own configuration."""

    def __init__(self, namespace: str | None, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        """Asks nothing yet.

        Args:
            namespace: The namespace; None for that of the context.
            variables: What to add to the environment of kubectl.
        """
        self._command = ["kubectl", *([] if namespace is None else [f"--namespace={namespace}"])]
        self._environment = {**os.environ, **variables}

    def check(self, manifests: Sequence[Mapping[str, Any]], volume_claim: str | None) -> None:
        """Refuses what the cluster would refuse, and creates nothing.

        Args:
            manifests: The objects that are to be created.
            volume_claim: The PersistentVolumeClaim that they name, if they do.

        Raises:
            UsageError: There is no kubectl or no cluster, or the cluster refuses the objects.
        """
        if shutil.which("kubectl") is None:
            raise UsageError("--engine kubernetes: kubectl is not installed; install kubectl, or add --dry-run")
        try:
            self._ask("version")
        except Unanswered as error:
            raise UsageError(
                f"--engine kubernetes: kubectl reaches no cluster ({error}); choose a context that exists, or add "
                "--dry-run"
            ) from error
        if volume_claim is not None:
            try:
                self._ask("get", "persistentvolumeclaim", volume_claim, "--output=name")
            except Unanswered as error:
                if _GONE in str(error):  # whoever may not look at claims may still use them
                    raise UsageError(
                        f"--volume-claim {volume_claim}: is not there ({error}); create it, or name another"
                    ) from error
        try:
            self._ask("create", "--dry-run=server", "--filename=-", manifests=manifests)
        except Unanswered as error:
            raise UsageError(
                f"--engine kubernetes: the cluster refuses the job ({error}); change what it names"
            ) from error

    def create(self, manifests: Sequence[Mapping[str, Any]]) -> None:
        """Creates a job and what belongs to it, which the cluster then removes with the job, whoever removes that.

        Args:
            manifests: The objects, of which the job is the last.

        Raises:
            Unanswered: Not all of them could be created.
        """
        *parts, job = manifests
        # The job comes first, since its parts name it by the number that the cluster gives it.
        uid = self._ask("create", "--filename=-", "--output=jsonpath={.metadata.uid}", manifests=[job])
        if parts:
            self._ask("create", "--filename=-", manifests=[_owned(part, job, uid) for part in parts])

    def delete(self, manifests: Sequence[Mapping[str, Any]], *, after_pods: bool = False) -> None:
        """Deletes objects and does not wait; what does not exist is no error.

        Args:
            manifests: The objects.
            after_pods: Whether they remain until their pods have ended.

        Raises:
            Unanswered: Some may still exist.
        """
        cascade = "foreground" if after_pods else "background"
        options = ("--ignore-not-found", "--wait=false", f"--cascade={cascade}")
        self._ask("delete", "--filename=-", *options, manifests=manifests)

    def end_pods(self, selector: str) -> None:
        """Ends pods without the time that they would have to save."""
        self._ask("delete", "pods", f"--selector={selector}", "--now", "--wait=false")

    def has_ended(self, kind: str, name: str) -> bool:
        """Whether a job has completed or failed, or exists no longer.

        Raises:
            Unanswered: That could not be found out.
        """
        try:
            found = json.loads(self._ask("get", kind, name, "--output=json"))
        except Unanswered as error:
            if _GONE in str(error):
                return True
            raise
        conditions = found.get("status", {}).get("conditions", [])
        return any(condition["type"] in _ENDS and condition["status"] == "True" for condition in conditions)

    def pods(self, selector: str) -> list[Pod]:
        """Returns the pods that labels select, the oldest first.

        Raises:
            Unanswered: That could not be found out.
        """
        options = (f"--selector={selector}", "--sort-by=.metadata.creationTimestamp", "--output=json")
        return [_pod(item) for item in json.loads(self._ask("get", "pods", *options))["items"]]

    def start_logs(self, pod: str, path: Path) -> Copying:
        """Starts to copy all that a pod prints into a file, until the pod has ended."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (`Copying` closes it)
        with path.open("wb") as file:
            process = subprocess.Popen(
                [*self._command, "logs", "--follow", pod],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=errors,
                start_new_session=True,
            )
        return Copying(process, errors)

    def _ask(self, *words: str, manifests: Sequence[Mapping[str, Any]] | None = None) -> str:
        done = subprocess.run(
            [*self._command, *words, f"--request-timeout={_MOST_SECONDS}"],
            env=self._environment,
            input="" if manifests is None else as_yaml(manifests),
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # Ctrl-C is for us to pass on
        )
        if done.returncode:
            raise Unanswered(_reason(done.stderr, done.returncode))
        return done.stdout


def _owned(part: Mapping[str, Any], job: Mapping[str, Any], uid: str) -> dict[str, Any]:
    """Returns an object that a job owns (https://kubernetes.io/docs/concepts/architecture/garbage-collection/)."""
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": job["metadata"]["name"],
        "uid": uid,
        "blockOwnerDeletion": False,
    }
    return {**part, "metadata": {**part["metadata"], "ownerReferences": [owner]}}


def _reason(errors: str, code: int) -> str:
    """Returns what kubectl says of a failure, on one line and without what it logs about itself."""
    said = " ".join(line.strip() for line in errors.splitlines() if _LOG_LINE.match(line) is None)
    return said or f"kubectl ended with exit code {code}"


class Copying(NamedTuple):
    """A kubectl that copies what a pod prints, and the file of what it says itself."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def trouble(self) -> str | None:
        """Returns why it could not copy; None if it has not failed."""
        if not self.process.poll():
            return None
        self.errors.seek(0)
        return _reason(self.errors.read().decode(errors="replace"), self.process.returncode)

    def end(self) -> None:
        """Ends it, if it has not ended."""
        self.process.kill()
        self.process.wait()
        self.errors.close()


class Logs:
    """The copies of what pods print; leaving this context ends the copying."""

    def __init__(self, kubectl: Kubectl, paths: Sequence[Path]) -> None:
        """Copies nothing yet.

        Args:
            kubectl: What copies.
            paths: The file for each index.
        """
        self._kubectl = kubectl
        self._paths = paths
        self._copying: dict[str, Copying] = {}
        self._ended: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for copying in self._copying.values():
            copying.end()

    def follow(self, pod: Pod) -> str | None:
        """Copies what a pod prints, again from its beginning if that has ended before the pod.

        kubectl ends with an error where a connection is lost, and without one where the other side has closed it.

        Returns:
            Why copying has failed, if it has just done so.
        """
        if pod.code is not None:
            self._ended.add(pod.name)
        copying = self._copying.get(pod.name)
        trouble = None
        if copying is not None:
            code = copying.process.poll()
            if code is None or (code == 0 and pod.code is not None):
                return None
            trouble = copying.trouble()
            self._copying.pop(pod.name).end()
        if pod.has_started and pod.index is not None:
            self._copying[pod.name] = self._kubectl.start_logs(pod.name, self._paths[pod.index])
        return trouble

    def finish(self) -> dict[str, str]:
        """Waits for the rest of what pods that have ended have printed, and shortly for that of the others.

        Returns:
            For each pod whose output could not be copied, why.
        """
        now = time.monotonic()
        for name, copying in self._copying.items():
            seconds = _MOST_SECONDS_OF_LOGS if name in self._ended else _SECONDS_OF_RUNNING_PODS
            with contextlib.suppress(subprocess.TimeoutExpired):
                copying.process.wait(max(0.0, now + seconds - time.monotonic()))
        troubles = {name: copying.trouble() for name, copying in self._copying.items()}
        return {name: trouble for name, trouble in troubles.items() if trouble is not None}


def as_yaml(manifests: Sequence[Mapping[str, Any]]) -> str:
    """Writes objects as kubectl reads them."""
    return yaml.dump_all(manifests, Dumper=_Plain, sort_keys=False, width=4096)


class _Plain(yaml.SafeDumper):
    """Writes a mapping that occurs twice twice: nobody wants to read anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _pod(item: Mapping[str, Any]) -> Pod:
    """Reads a pod of the API (https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/)."""
    metadata, status = item["metadata"], item.get("status", {})
    annotations = metadata.get("annotations", {})
    container: Mapping[str, Any] = next(iter(status.get("containerStatuses", [])), {})
    state = container.get("state", {})
    # Whoever starts a container again hides how it has ended.
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated")
    waiting = state.get("waiting")
    troubles = [
        *([waiting] if waiting and waiting.get("reason") not in ("ContainerCreating", "PodInitializing") else []),
        *([ended] if ended and ended.get("reason") not in ("Completed", "Error") else []),
        *(one for one in status.get("conditions", []) if one["type"] == "PodScheduled" and one["status"] == "False"),
        *(one for one in status.get("conditions", []) if one["type"] == "DisruptionTarget" and one["status"] == "True"),
    ]
    trouble = next((": ".join(filter(None, (one.get("reason"), one.get("message")))) for one in troubles), None)
    return Pod(
        name=metadata["name"],
        index=None if metadata["labels"].get(_MPI_ROLE) == "worker" else int(annotations.get(_INDEX, 0)),
        has_started="running" in state or ended is not None,
        code=ended["exitCode"] if ended else None,
        trouble=trouble,
    )
