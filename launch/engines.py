"""The commands that start ranks: each library's own launcher, told the same things in its own words.

An engine only composes a command line and its environment. Whatever the launcher, each rank runs
``python -m MODULE ARGUMENTS`` in the project's directory, with the same number of threads.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.errors import UsageError
from launch.nodes import ALONE, DEFAULT_PORT, Nodes, interface, own_address

PROJECT_DIRECTORY = Path(__file__).resolve().parent.parent

# Variables of the user's shell that would quietly change what a run computes or how it is started.
_SCRUBBED_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "OMPI_COMM_", "PET_")
# fp32 is to mean fp32: NVIDIA's images turn on TF32, which has ten bits of mantissa.
EXACT_FLOAT32 = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "NVIDIA_TF32_OVERRIDE": "0"}
_SCRUBBED = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
    "HOROVOD_RANK", "HOROVOD_SIZE", "PYTHONWARNINGS", "PYTHONSTARTUP", "PYTHONINSPECT",
)  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """The ranks to start.

    Attributes:
        num_processes: How many, on all nodes.
        module: The module each runs, and its arguments.
        device: "cpu" or "cuda".
        num_threads: CPU threads of each.
        master_port: Where they are to meet, None for any free port.
        timeout_seconds: How long a collective may wait.
        log_directory: Where a launcher may leave files of its own.
        nodes: The machines they are spread over.
    """

    num_processes: int
    module: tuple[str, ...]
    device: str
    num_threads: int
    master_port: int | None
    timeout_seconds: float
    log_directory: Path
    nodes: Nodes = ALONE

    @property
    def num_local_processes(self) -> int:
        """Ranks of this machine."""
        return self.num_processes // self.nodes.num_nodes

    @property
    def port(self) -> int:
        """Where several nodes meet."""
        return self.master_port or DEFAULT_PORT


def _launcher(ranks: Ranks, module: str) -> list[str]:
    """A launcher that is a Python module; where all ranks are here, it listens for nobody else."""
    confined = ["launch.loopback"] if ranks.nodes.num_nodes == 1 else []
    return [sys.executable, "-m", *confined, module]


def _python(ranks: Ranks) -> list[str]:
    return [sys.executable, "-m", *ranks.module]


def _torchrun(ranks: Ranks) -> list[str]:
    command = [*_launcher(ranks, "torch.distributed.run"), f"--nproc-per-node={ranks.num_local_processes}"]
    command += [f"--local-addr={own_address(ranks.nodes)}", f"--log-dir={ranks.log_directory / 'torchrun'}"]
    if ranks.nodes.num_nodes > 1:
        command += [f"--nnodes={ranks.nodes.num_nodes}", "--rdzv-backend=c10d", f"--rdzv-conf={_rendezvous(ranks)}"]
        command += [f"--rdzv-endpoint={ranks.nodes.master_addr}:{ranks.port}"]
    elif ranks.master_port is None:
        command += ["--standalone"]
    else:
        command += ["--master-addr=127.0.0.1", f"--master-port={ranks.master_port}"]
    return [*command, "-m", *ranks.module]


def _rendezvous(ranks: Ranks) -> str:
    seconds = max(1, round(ranks.timeout_seconds))
    return f"is_host={int(ranks.nodes.node_rank == 0)},join_timeout={seconds},read_timeout={seconds}"


def _spawn(ranks: Ranks) -> list[str]:
    port = [f"--master-port={ranks.master_port}"] if ranks.master_port is not None else []
    command = [*_launcher(ranks, "launch.spawn"), f"--num-processes={ranks.num_processes}", *port]
    return [*command, *ranks.module]


def _accelerate(ranks: Ranks) -> list[str]:
    # Also on CPU, where --cpu would start one process whatever --num_processes says, and
    # ACCELERATE_USE_CPU keeps the ranks off the GPUs that --multi_gpu speaks of.
    config = PROJECT_DIRECTORY / "launch" / "accelerate_config.yaml"
    command = [*_launcher(ranks, "accelerate.commands.launch"), f"--config_file={config}"]
    if ranks.num_processes > 1:
        command += ["--multi_gpu"]
    command += [f"--num_processes={ranks.num_processes}", f"--num_machines={ranks.nodes.num_nodes}"]
    command += ["--mixed_precision=no", "--dynamo_backend=no", f"--log_dir={ranks.log_directory / 'torchrun'}"]
    if ranks.nodes.num_nodes > 1:
        command += [f"--machine_rank={ranks.nodes.node_rank}", f"--main_process_ip={ranks.nodes.master_addr}"]
        command += [f"--main_process_port={ranks.port}", "--rdzv_backend=c10d", f"--rdzv_conf={_rendezvous(ranks)}"]
    else:
        command += [f"--main_process_port={ranks.master_port or 0}"]
    return [*command, "--module", *ranks.module]


def _horovodrun(ranks: Ranks) -> list[str]:
    # Loopback only: otherwise it first looks for an interface that all hosts share.
    command = [
        *_launcher(ranks, "horovod.runner.launch"),
        "-np",
        str(ranks.num_processes),
        "--gloo",
        "--network-interfaces",
        "lo",
    ]
    return [*command, sys.executable, "-m", *ranks.module]


def _horovod_node(ranks: Ranks) -> list[str]:
    nodes = ranks.nodes
    command = [sys.executable, "-m", "launch.horovod_node", f"--num-processes={ranks.num_processes}"]
    command += [f"--num-nodes={nodes.num_nodes}", f"--node-rank={nodes.node_rank}"]
    # Where all ranks are on one machine, whatever port is free.
    port = ranks.port if nodes.num_nodes > 1 else ranks.master_port or 0
    command += [f"--master-addr={nodes.master_addr}", f"--master-port={port}"]
    command += [f"--interface={interface(nodes)}", f"--timeout={ranks.timeout_seconds}"]
    return [*command, *ranks.module]


def _mpirun(ranks: Ranks) -> list[str]:
    command = [_script("mpirun"), "-np", str(ranks.num_processes), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        command += ["--allow-run-as-root"]
    # All ranks are here: shared memory carries everything, and nothing needs to listen on other interfaces.
    command += ["--mca", "btl", "self,vader", "--mca", "oob_tcp_if_include", "lo"]
    return [*command, sys.executable, "-m", *ranks.module]


_COMMANDS: Mapping[str, Callable[[Ranks], list[str]]] = {
    "python": _python,
    "torchrun": _torchrun,
    "spawn": _spawn,
    "accelerate": _accelerate,
    "horovodrun": _horovodrun,
    "mpirun": _mpirun,
    "horovod-node": _horovod_node,
}
_LAUNCHER_NAMES = {
    "torch.distributed.run": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "horovod.runner.launch": "horovodrun",
    "launch.spawn": "spawn",
    "launch.horovod_node": "horovod-node",
    "mpirun": "mpirun",
}
_WITHOUT_PORT = ("python", "horovodrun", "mpirun")
# What starts one machine's ranks of a job that spans several.
ACROSS_NODES = ("torchrun", "accelerate", "horovod-node")


def engine_command(start_method: str, ranks: Ranks) -> list[str]:
    """Composes the command that starts these ranks.

    Raises:
        UsageError: The launcher is not installed, or cannot be given a port.
    """
    if ranks.master_port is not None and start_method in _WITHOUT_PORT:
        raise UsageError(f"--master-port {ranks.master_port}: {start_method} cannot be given a port; leave it out")
    if start_method not in _COMMANDS:
        raise UsageError(f"start method {start_method!r}: there is no such launcher; choose {', '.join(_COMMANDS)}")
    return _COMMANDS[start_method](ranks)


def launcher_name(command: list[str]) -> str | None:
    """Returns what people call the launcher that this command starts; None where it starts the rank itself."""
    words = {Path(command[0]).name, *command}
    return next((name for word, name in _LAUNCHER_NAMES.items() if word in words), None)


def engine_environment(ranks: Ranks) -> dict[str, str]:
    """Returns the environment for a launcher: the user's, less what would change the run unseen."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_SCRUBBED_PREFIXES) and name not in _SCRUBBED
    }
    if "PYTHONPATH" in environment:
        # Ranks work in the project's directory, the user may have meant another.
        paths = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths if path)
    environment |= {
        **EXACT_FLOAT32,
        "OMP_NUM_THREADS": str(ranks.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        # No file in the working directory can pose as a library.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        # One machine's ranks meet on the loopback interface, wherever its name resolves to, those of
        # several on the one that leads to node 0.
        "GLOO_SOCKET_IFNAME": interface(ranks.nodes),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(ranks.timeout_seconds))),
        # Rank 0 may still save after another rank is lost; torchrun would end it after half a minute.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(30, round(ranks.timeout_seconds))),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if ranks.nodes.num_nodes > 1:
        environment["PET_LOCAL_ADDR"] = own_address(ranks.nodes)  # --local-addr of the torchrun inside accelerate
    if ranks.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["ACCELERATE_USE_CPU"] = "true"
    return environment


def _script(name: str) -> str:
    """Finds a command beside this interpreter, else on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        hint = "install Open MPI (Debian: openmpi-bin)" if name == "mpirun" else "run launch/run.sh horovod"
        raise UsageError(f"{name} is not installed; {hint}")
    return found
