"""Kubernetes: each node is a pod, and kubectl, with the user's own rights, creates, follows and deletes the job."""

from __future__ import annotations

import re
import secrets
import signal
import time
from collections.abc import Callable
from functools import cached_property

from typing_extensions import override

from backends.registry import find_backend
from engines.following import Followed, exit_code_of
from engines.interface import Engine, NodeJob
from engines.kubectl import Kubectl, Logs, Unanswered, as_yaml
from engines.kubernetes_manifests import INSTANCE_LABEL, Manifest, compose, slug
from engines.kubernetes_settings import KubernetesSettings
from engines.on_host import REFUSED
from launch.errors import UsageError, one_line, say, tell
from launch.guardian import guarded
from launch.signals import Interrupted, signals_raised

_SECONDS_BETWEEN_LOOKS = 1.0
# The objects of each kind of job, and the starter that a backend must have for it.
_RESOURCES = {
    "indexed-job": "jobs.batch",
    "train-job": "trainjobs.trainer.kubeflow.org",
    "mpi-job": "mpijobs.kubeflow.org",
}
_STARTERS = {"train-job": "torchrun", "mpi-job": "mpirun"}


class Kubernetes(Engine[KubernetesSettings]):
    """A cluster that kubectl reaches."""

    name = "kubernetes"
    summary = "Pods of a Kubernetes cluster, through kubectl."
    Settings = KubernetesSettings
    shares_files = False

    def __init__(self, job: NodeJob, settings: KubernetesSettings) -> None:
        super().__init__(job, settings)
        self._name = f"lockstep-{slug(job.backend)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"

    @override
    def check(self) -> None:
        job, settings = self.job, self.settings
        if settings.image is None:
            raise UsageError(f"--image: is missing; name an image of {job.backend} that the cluster can pull")
        if settings.gpus is not None and job.run.device == "cpu":
            raise UsageError(f"--gpus {settings.gpus}: --device cpu uses none; leave one of the two out")
        if settings.cpus is not None and settings.cpus < job.num_local_processes:
            raise UsageError(
                f"--cpus {settings.cpus}: a node runs {job.num_local_processes} ranks; give each of them one"
            )
        starter = _STARTERS.get(settings.kind)
        if starter is not None and starter not in find_backend(job.backend).capabilities.start_methods:
            raise UsageError(
                f"--kind {settings.kind}: is for backends that {starter} starts, which {job.backend} is not; "
                "use --kind indexed-job"
            )
        if any(word.partition("=")[0] == "--config" for word in job.options):
            raise UsageError(
                "--config: the pods cannot read this machine's files; give its options on the command line"
            )
        if re.fullmatch(r"[\w.+-]+", job.output_dir.name, re.ASCII) is None:
            raise UsageError(
                f"--output-dir {job.output_dir}: its last part names a directory in the volume; use letters, digits, "
                "and .+_- there"
            )

    @override
    def script(self) -> str:
        self._warn()
        return as_yaml(self._manifests).rstrip()

    @override
    def check_here(self) -> None:
        Kubectl(self.settings.namespace).check(self._manifests, self.settings.volume_claim)

    @override
    def run(self) -> int:
        self._warn()
        for log in self.job.logs:
            log.unlink(missing_ok=True)
        asked_to_stop: list[signal.Signals] = []
        with guarded() as mark, signals_raised(asked_to_stop.append):
            kubectl = Kubectl(self.settings.namespace, mark)
            try:
                kubectl.create(self._manifests)
                tell(f"created {self._resource} {self._name}")
                codes = self._follow(kubectl, asked_to_stop)
            except Unanswered as error:
                raise UsageError(
                    f"--engine kubernetes: the job cannot be created ({error}); change what it names"
                ) from error
            except Interrupted:
                self._end(lambda: kubectl.end_pods(self._selector))
                raise
            finally:
                self._end(lambda: kubectl.delete(self._manifests))
        if (claim := self.settings.volume_claim) is not None:
            say(f"the nodes have written into the volume of {claim}: {self.job.output_dir.name}/node*")
        if len(codes) == self._num_followed or any(codes.values()):
            return exit_code_of(list(codes.values()))
        if asked_to_stop:
            return 128 + asked_to_stop[0]
        tell(f"{self._resource} {self._name} has ended, or was deleted, before all of its nodes had an exit code")
        return 1

    def _warn(self) -> None:
        if self.settings.volume_claim is None:
            tell("without --volume-claim, the model, the record and the checkpoints are lost with the pods")

    def _follow(self, kubectl: Kubectl, asked_to_stop: list[signal.Signals]) -> dict[int, int]:
        """Shows what the nodes print until the job has ended; returns the exit codes that are known, by node."""
        codes: dict[int, int] = {}
        said: set[tuple[str, str]] = set()
        followed = Followed(self.job.logs)
        has_ended = is_ending = False
        with Logs(kubectl, self.job.logs) as logs:
            while not has_ended:
                try:
                    if asked_to_stop and not is_ending:
                        kubectl.delete(self._manifests, after_pods=True)
                        name = asked_to_stop[0].name
                        tell(f"{name}: the nodes save a checkpoint and stop; a second {name} stops them at once")
                        is_ending = True
                    is_over = kubectl.has_ended(self._resource, self._name)  # asked first: its pods end before it
                    for pod in kubectl.pods(self._selector):
                        self._say_unread(said, pod.name, logs.follow(pod))
                        if pod.index is not None and pod.code is not None:
                            codes.setdefault(pod.index, pod.code)
                        self._say_once(said, pod.name, pod.trouble)
                    # A runtime that starts failed pods again would find their directories taken.
                    # Others would wait in vain for a node that refuses its options.
                    has_ended = is_over or len(codes) == self._num_followed or REFUSED in codes.values()
                except Unanswered as error:
                    self._say_once(said, "the cluster", str(error))
                followed.show()
                if not has_ended:
                    time.sleep(_SECONDS_BETWEEN_LOOKS)
            for name, why in logs.finish().items():
                self._say_unread(said, name, why)
            followed.show()
        return codes

    def _say_unread(self, said: set[tuple[str, str]], pod: str, why: str | None) -> None:
        if why is not None:
            self._say_once(said, pod, f"what it prints cannot be read: {why}")

    def _say_once(self, said: set[tuple[str, str]], who: str, what: str | None) -> None:
        """Tells what a pod waits for or suffers from; the same reason may come with other numbers again and again."""
        if what is not None and (key := (who, what.partition(":")[0])) not in said:
            said.add(key)
            tell(one_line(f"{who}: {what}"))

    def _end(self, request: Callable[[], None]) -> None:
        try:
            request()
        except Unanswered as error:
            tell(one_line(f"{self._resource} {self._name} may still be there ({error}); delete it with kubectl"))

    @property
    def _num_followed(self) -> int:
        """How many pods run commands of Lockstep, or an mpirun that does."""
        return 1 if self.settings.kind == "mpi-job" else self.job.num_nodes

    @property
    def _resource(self) -> str:
        return _RESOURCES[self.settings.kind]

    @property
    def _selector(self) -> str:
        return f"{INSTANCE_LABEL}={self._name}"

    @cached_property
    def _manifests(self) -> list[Manifest]:
        return compose(self.job, self.settings, self._name)
