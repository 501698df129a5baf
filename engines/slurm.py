"""A SLURM cluster (https://slurm.schedmd.com): sbatch starts a script, whose srun starts the command of each node."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from typing_extensions import override

from engines.following import Followed
from engines.interface import Engine, EngineSettings, check_node
from engines.slurm_job import SlurmJob
from launch.errors import UsageError, say, tell
from launch.signals import Interrupted, signals_raised
from launch.starters.environment import command_environment
from records.run_files import holds_run

_BODY = Path(__file__).with_name("slurm.sh")
_SCRIPT_NAME = "job.sh"
_LOG_NAME = "job.log"

# How long before the time limit a job is told to stop, besides the time in which a rank that hangs is noticed;
# sbatch(1): "up to 60 seconds earlier than specified", and at most so long before.
_SECONDS_TO_SAVE = 60
_SECONDS_EARLIER = 60
_MOST_SECONDS_BEFORE = 65535
_LEAST_SECONDS_TO_TRAIN = 60

# sbatch(1): minutes, minutes:seconds, hours:minutes:seconds, or days before hours and what follows them.
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")

# What the script sets itself, and how a user says it.
_OWN = {
    "nodes": "use --num-nodes",
    "ntasks": "each node has one task, which starts its ranks; use --num-processes",
    "ntasks-per-node": "each node has one task, which starts its ranks; use --num-processes",
    "output": "use --output-dir",
    "error": "use --output-dir",
    "chdir": "run the command in that directory",
    "array": "start one job for each run",
    **dict.fromkeys(("clusters", "cluster"), "set the variable SLURM_CLUSTERS, which scontrol and scancel read, too"),
    "signal": "it is told to stop in time to save a checkpoint",
    "test-only": "use --dry-run",
    "wait": "the command waits for the job",
    "wrap": "the job runs the script of Lockstep",
    **{
        name: f"use --{name}"
        for name in ("partition", "time", "account", "qos", "gpus-per-node", "cpus-per-task", "mem")
    },
    **dict.fromkeys(("requeue", "no-requeue"), "use --requeue or --no-requeue"),
}

# Variables that say which cluster it is, and who asks.
_OF_CLUSTER = ("SLURM_CLUSTERS", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")

# What the messages of sbatch say of options.
_REFUSED_OPTIONS = {
    "invalid partition": "partition",
    "account": "account",
    "qos": "qos",
    "generic resource|gres": "gpus_per_node",
    "memory": "mem",
    "time limit": "time",
}


def _name(value: str) -> str:
    if not value or not value.isprintable() or " " in value:
        raise ValueError("is not a name; give one word")
    return value


def _time(value: str) -> str:
    if _seconds(value) is None:
        raise ValueError("is not a time of SLURM; write it as 90 (minutes), 12:00:00 or 2-12:00:00")
    return value


def _seconds(value: str) -> int | None:
    found = _TIME.fullmatch(value)
    if found is None:
        return None
    parts = [int(part) for part in found["parts"].split(":")]
    units = [60, 1] if found["days"] is None and len(parts) < 3 else [3600, 60, 1]
    return int(found["days"] or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _mem(value: str) -> str:
    if re.fullmatch(r"[1-9]\d*[KMGT]?", value) is None:
        raise ValueError("is not an amount of memory; write it as 4000M or 16G")
    return value


def _sbatch_options(values: list[str]) -> list[str]:
    for value in values:
        option = value.partition("=")[0]
        if re.fullmatch(r"[a-z][a-z0-9-]*", option) is None or not value.isprintable():
            raise ValueError(f"{value!r} is no option of sbatch; write its long form without dashes: constraint=a100")
        if option in _OWN:
            raise ValueError(f"{value!r} is set by Lockstep; {_OWN[option]}")
    return values


# How options of sbatch begin that ask for GPUs or cores in another way than ours.
_IN_ANOTHER_WAY = ("cores", "cpus", "exclusive", "gpus", "gres", "ntasks", "tres")

Name = Annotated[str, AfterValidator(_name)]


class SlurmSettings(EngineSettings):
    """What the job asks of the cluster."""

    partition: Name | None = Field(None, description="partition of the cluster (default: that of the cluster)")
    time: Annotated[str, AfterValidator(_time)] | None = Field(
        None,
        description="time limit, such as 90 (minutes), 12:00:00 or 2-12:00:00 (default: that of the partition)",
        json_schema_extra={"metavar": "TIME"},
    )
    account: Name | None = Field(None, description="account that is charged")
    qos: Name | None = Field(None, description="quality of service")
    gpus_per_node: int | None = Field(None, ge=1, description="GPUs of each node (default: none)")
    cpus_per_task: int | None = Field(
        None, ge=1, description="cores of each node, for all its ranks together (default: one for each thread)"
    )
    mem: Annotated[str, AfterValidator(_mem)] | None = Field(
        None,
        description="memory of each node, such as 16G (default: that of the partition)",
        json_schema_extra={"metavar": "SIZE"},
    )
    requeue: bool = Field(
        True,
        description="put the job back into the queue when its time is over or a node fails; it continues from its "
        "newest checkpoint",
    )
    sbatch_option: Annotated[list[str], AfterValidator(_sbatch_options)] = Field(
        default=[],
        description="another option of sbatch, without dashes, such as constraint=a100; may be given several times",
        json_schema_extra={"each": "OPTION[=VALUE]"},
    )

    @property
    @override
    def num_gpus(self) -> int:
        return self.gpus_per_node or 0

    @property
    @override
    def num_cpus(self) -> int | None:
        return self.cpus_per_task


def environment_for_sbatch() -> dict[str, str]:
    """Returns the environment of this command without what would change the job.

    sbatch takes variables of its own for the options in the script, and passes on those of an allocation in which it is
    called, such as the cores of its steps and their memory, to the steps of the job.
    """
    return {
        name: value
        for name, value in command_environment().items()
        if name in _OF_CLUSTER or not name.startswith(("SBATCH_", "SLURM_"))
    }


class Slurm(Engine[SlurmSettings]):
    """A SLURM cluster whose nodes share a file system."""

    name = "slurm"
    summary = "A SLURM cluster whose nodes share a file system: a job of sbatch."
    Settings = SlurmSettings

    @override
    def check(self) -> None:
        settings = self.settings
        if not any(name.startswith(_IN_ANOTHER_WAY) for name, _, _ in self._further()):
            check_node(self.job, num_gpus=settings.num_gpus, num_cpus=settings.cpus_per_task, option="--cpus-per-task")
        before, asked = self._seconds_before, settings.time
        least = before + _SECONDS_EARLIER + _LEAST_SECONDS_TO_TRAIN
        if asked is not None and (_seconds(asked) or 0) < least:
            raise UsageError(
                f"--time {asked}: is too short, since the job is told to stop {before} to {before + _SECONDS_EARLIER} "
                f"s before; give at least {math.ceil(least / 60)} minutes, or a smaller --hang-timeout (it is "
                f"{self.job.run.hang_timeout:g} s)"
            )

    @property
    def _seconds_before(self) -> int:
        """How long before its time limit the job is told to stop."""
        return min(math.ceil(self.job.run.hang_timeout) + _SECONDS_TO_SAVE, _MOST_SECONDS_BEFORE)

    @override
    def script(self) -> str:
        output_dir = self.job.output_dir
        environment = command_environment()
        exported = {name: environment[name] for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
        own_port = "" if self.job.run.master_port or self.job.num_nodes == 1 else ' --master-port="$master_port"'
        return "\n".join(
            [
                "#!/bin/bash",
                # SLURM does not make the directory of the output, and ends a job that has none.
                f"# before sbatch: mkdir -p {shlex.quote(str(output_dir))}",
                *(f"#SBATCH --{option}" for option in self._options()),
                "",
                f"output_dir={shlex.quote(str(output_dir))}",
                f"cpus_per_task={self._cpus_per_task}",
                f"requeue={'yes' if self.settings.requeue else ''}",
                f"overwrite={'yes' if self.job.run.overwrite else ''}",
                *(f"export {name}={shlex.quote(value)}" for name, value in exported.items()),
                "train() {",
                f'  exec {self._line()}{own_port} "$@"',  # whose number is then that of the shell
                "}",
                "",
                _BODY.read_text(),
            ]
        ).removesuffix("\n")

    @override
    def check_here(self) -> None:
        if shutil.which("sbatch") is None:
            raise UsageError(
                "--engine slurm: there is no SLURM on this machine (sbatch is not installed); use a login node of a "
                "cluster, or --dry-run, and submit there what it prints"
            )
        self._check_output_dir()

    @override
    def run(self) -> int:
        script = self.job.output_dir / _SCRIPT_NAME
        script.write_text(self.script() + "\n")
        followed = Followed(self.job.logs)
        asked: list[signal.Signals] = []
        # A job whose number is not known yet could not be ended: a first signal waits for it.
        with signals_raised(asked.append):
            number = self._submit(script)
            say(f"job {number} is in the queue of SLURM; its script is {script}")
            return SlurmJob(number, followed, self.job.output_dir / _LOG_NAME).to_the_end(asked)

    def _submit(self, script: Path) -> str:
        """Puts the job into the queue and returns its number.

        Raises:
            UsageError: SLURM refuses the job.
            Interrupted: A second signal came before sbatch had said its number.
        """
        try:
            done = subprocess.run(
                ["sbatch", "--parsable", str(script)],
                env=environment_for_sbatch(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                start_new_session=True,  # Ctrl-C is for this command
            )
        except Interrupted:
            log = self.job.output_dir / _LOG_NAME
            tell(
                "sbatch was ended before it said whether the job is in the queue; squeue --me "
                f"--Format=JobID,STDOUT:200 lists it with the output {log}; end it with scancel"
            )
            raise
        if done.returncode:
            script.unlink()
            raise self._refused(done.stderr)
        return done.stdout.strip().partition(";")[0]

    @property
    def _cpus_per_task(self) -> int:
        threads = self.job.run.threads_per_rank or 1
        return self.settings.cpus_per_task or threads * self.job.num_local_processes

    def _line(self) -> str:
        job = self.job
        if job.run.threads_per_rank is None:
            # Not every cluster binds a task to its cores, and then a node would count all of the machine's.
            threads = max(1, self._cpus_per_task // job.num_local_processes)
            job = replace(job, options=(*job.options, f"--threads-per-rank={threads}"))
        return job.shell_line("$SLURM_NODEID", "$master_addr")

    def _options(self) -> list[str]:
        settings = self.settings
        asked = {
            "job-name": f"lockstep-{re.sub(r'[^A-Za-z0-9]', '-', self.job.backend)}",
            "nodes": self.job.num_nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self._cpus_per_task,
            "gpus-per-node": settings.gpus_per_node,
            "mem": settings.mem,
            "partition": settings.partition,
            "time": settings.time,
            "account": settings.account,
            "qos": settings.qos,
            "chdir": Path.cwd(),
            "output": str(self.job.output_dir / _LOG_NAME).replace("%", "%%"),
            "open-mode": "append",
            "signal": f"B:USR1@{self._seconds_before}",
        }
        words = [(name, str(value)) for name, value in asked.items() if value is not None]
        return [
            *(f"{name}={shlex.quote(value)}" for name, value in words),
            "requeue" if settings.requeue else "no-requeue",
            # The last ones count.
            *(f"{name}{equals}{shlex.quote(value) if equals else ''}" for name, equals, value in self._further()),
        ]

    def _further(self) -> list[tuple[str, str, str]]:
        return [option.partition("=") for option in self.settings.sbatch_option]

    def _check_output_dir(self) -> None:
        """Refuses now what the nodes would refuse when the job has waited for its turn."""
        is_expected = self.job.run.overwrite or any(
            word.partition("=")[0] in ("--resume", "--config") for word in self.job.options
        )
        if not is_expected and any(holds_run(Path(self.job.directory(rank))) for rank in range(self.job.num_nodes)):
            raise UsageError(
                f"--output-dir {self.job.output_dir}: already holds a run; add --resume or --overwrite, or choose "
                "another directory"
            )

    def _refused(self, errors: str) -> UsageError:
        """Returns the error for a job that sbatch does not take."""
        lines = [line.removeprefix("sbatch: ") for line in errors.strip().splitlines()] or ["no reason given"]
        reason = next((line for line in lines if line.startswith("error: ")), lines[0])
        reason = reason.removeprefix("error: ").removeprefix("Batch job submission failed: ")
        if "slurm controller" in reason:
            return UsageError(f"--engine slurm: SLURM does not answer ({reason}); try again when scontrol ping says UP")
        for pattern, name in _REFUSED_OPTIONS.items():
            value = getattr(self.settings, name)
            if re.search(pattern, reason, re.IGNORECASE) and value is not None:
                return UsageError(
                    f"--{name.replace('_', '-')} {value}: SLURM refuses it ({reason}); change it, or leave it out"
                )
        return UsageError(f"--engine slurm: sbatch refuses the job ({reason}); change what it asks for")
