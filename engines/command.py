"""``launch/run.sh BACKEND --engine NAME [options]``: trains on the nodes that an engine starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from backends.registry import BackendRow, find_backend
from engines.interface import Engine, EngineSettings, NodeJob
from engines.registry import find_engine
from engines.resuming import check_divides, find_start_here, inherited_words, most_threads
from launch.arguments import Once, Parser, named_path
from launch.errors import UsageError, refused_path, say, tell
from launch.nodes import Nodes
from launch.options import add_options, read_option_file, read_options, validated
from launch.resolve import settle_batch_sizes
from launch.resume import Finished, Start, check_many_ranks
from launch.run_directory import default_output_dir, locked
from launch.train_command import say_finished
from launch.world import check_world

# What an engine gives to each node.
_OF_A_NODE = ("--node-rank", "--master-addr")
# What the engine reads itself.
_OF_A_COMMAND_LINE = ("num_nodes", "num_processes", "output_dir", "resume")
_NO_ADDRESS = "127.0.0.1"
_NUM_NODES = 2


class _Size(BaseModel):
    """The options about how many nodes and ranks there are."""

    num_nodes: int | None = Field(None, ge=1, description="number of nodes (default: 2)")
    num_processes: int | None = Field(
        None, ge=1, description="ranks on all nodes together (default: one for each node, or for each GPU asked for)"
    )


class _SizeOfHosts(_Size):
    """The same where the user names the hosts."""

    num_nodes: int | None = Field(None, ge=1, description="number of nodes: follows from --hosts")
    num_processes: int | None = Field(
        None, ge=1, description="ranks on all nodes together: follows from --hosts, if it says how many each runs"
    )


def run(arguments: list[str], *, program: tuple[str, ...] | None = None) -> int:
    """Runs a training through an engine; returns the exit code.

    Args:
        arguments: The backend and the options, those of the engine among them.
        program: What each node runs, if that is not Lockstep's own command line.

    Raises:
        UsageError, UnsupportedError, TaskInputError: Something in them cannot be used.
    """
    try:
        engine, is_dry_run = planned(arguments)
    except Finished as finished:
        return say_finished(finished)
    if program is not None:
        engine.job = replace(engine.job, program=program)
    engine.check()
    if is_dry_run:
        print(engine.script())
        return 0
    return _run(engine)


def planned(arguments: list[str]) -> tuple[Engine[Any], bool]:
    """Returns the engine that such arguments ask for, with its job, and whether they ask only to show that.

    Raises:
        Finished: The run that they are to resume has finished.
        UsageError, UnsupportedError, TaskInputError: Something in them cannot be used, wherever it is run.
    """
    backend, *options = arguments
    row = find_backend(backend)
    name = _engine_named(backend, options)
    kind = find_engine(name)
    parser = Parser(f"{backend} --engine {name}", argument_default=None)
    parser.description = f"{kind.summary} All other options are those of a training (launch/run.sh {backend} --help)."
    parser.add_argument("--engine", action=Once, help="what starts the nodes")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what the engine would be given, and start nothing"
    )
    parser.add_argument(
        "--output-dir", type=named_path, action=Once, help="receives a directory of each node, and logs"
    )
    size = _SizeOfHosts if "hosts" in kind.Settings.model_fields else _Size
    add_options(parser, {"nodes": size, f"engine {name}": kind.Settings})
    namespace, of_training = parser.parse_known_args(options)
    asked = {key: value for key, value in vars(namespace).items() if value is not None}
    settings = validated(kind.Settings, asked)
    return kind(_job(kind, settings, backend, row, of_training, asked), settings), asked["dry_run"]


def _engine_named(backend: str, options: list[str]) -> str:
    parser = Parser(backend, add_help=False)
    parser.add_argument("--engine", action=Once)
    known, _ = parser.parse_known_args(options)
    return str(known.engine)


def _job(
    kind: type[Engine[Any]],
    settings: EngineSettings,
    backend: str,
    row: BackendRow,
    of_training: list[str],
    asked: dict[str, Any],
) -> NodeJob:
    """Checks the options of the training as far as they do not depend on a machine."""
    _check_config(of_training)
    for option in _OF_A_NODE:
        if any(word.partition("=")[0] == option for word in of_training):
            raise UsageError(f"{option}: the engine gives each node its own; leave the option out")
    start = find_start_here(of_training, asked.get("output_dir")) if kind.shares_files else None
    num_nodes, num_processes = _sizes(kind, settings, asked, start)
    sizes = [f"--num-processes={num_processes}"]
    if num_nodes > 1:
        sizes += [f"--num-nodes={num_nodes}", f"--master-addr={_NO_ADDRESS}"]
    # A checkpoint that cannot be read here is known where the node runs, and so are the options that come from its run.
    given = of_training if start is not None else _without_resume(of_training)
    threads = most_threads(settings, num_processes // num_nodes) if kind.gives_cores else None
    options = read_options(backend, row.settings, [*given, *sizes], start=start, most_threads=threads)
    run = options.run
    device = _device(run.device, row, settings)
    if run.min_nodes is not None:
        raise UsageError(
            f"--min-nodes {run.min_nodes}: engines start each node once and end the job when one is lost; start the "
            "nodes by hand (docs/nodes.md), or leave the option out"
        )
    check_world(backend, row, run, device=device, num_processes=num_processes, nodes=Nodes(num_nodes))
    if given == of_training or "global_batch_size" in run.model_fields_set:
        settle_batch_sizes(run.global_batch_size, run.micro_batch_size, num_processes)
    output_dir = asked.get("output_dir") or default_output_dir(backend)
    job = NodeJob(
        backend=backend,
        options=(*of_training, *inherited_words(options)),
        run=run,
        num_nodes=num_nodes,
        num_processes=num_processes,
        output_dir=Path(output_dir).absolute(),
        # The library of a backend may have been built for GPUs on the nodes, and not here.
        device=device if run.device == "auto" else run.device,
    )
    _check_gpus(job, row, settings)
    return job


def _sizes(
    kind: type[Engine[Any]], settings: EngineSettings, asked: dict[str, Any], start: Start | None
) -> tuple[int, int]:
    """Returns the numbers of nodes and of ranks: those that are asked for, else those of the run to resume.

    Raises:
        UsageError: They contradict each other.
    """
    of_engine = settings.sizes()
    size: _Size = validated(_Size, {**of_engine, **asked})
    for name, value in of_engine.items():
        if getattr(size, name) != value:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} {asked[name]}: the engine's options make it {value}; leave {option} out")
    before = start.config if start is not None else None
    num_nodes = size.num_nodes or (before.num_nodes if before is not None else _NUM_NODES)
    if size.num_processes is not None or before is None:
        return num_nodes, size.num_processes or num_nodes * settings.ranks_per_node
    if kind.is_here:
        check_many_ranks(before)
    check_divides(before, num_nodes)
    return num_nodes, before.num_processes


def _device(asked: str, row: BackendRow, settings: EngineSettings) -> str:
    """Returns what the nodes compute on, as far as it is known here."""
    devices = row.capabilities.precisions
    if asked == "auto" and settings.num_gpus and "cuda" in devices:
        return "cuda"
    if asked == "auto" or (asked not in devices and row.capabilities.gpus_depend_on_build):
        return "cpu" if "cpu" in devices else next(iter(devices))
    return asked


def _check_gpus(job: NodeJob, row: BackendRow, settings: EngineSettings) -> None:
    if 0 < settings.num_gpus < job.num_local_processes and not row.capabilities.ranks_may_share_gpu:
        raise UsageError(
            f"--num-processes {job.num_processes}: {job.backend} needs a GPU for each of the {job.num_local_processes} "
            f"ranks of a node, and {settings.num_gpus} are asked for; ask for more GPUs, or fewer ranks"
        )


def _check_config(of_training: list[str]) -> None:
    """Refuses a file whose options the engine would set otherwise on the command line of each node."""
    parser = Parser("", add_help=False)
    parser.add_argument("--config", type=named_path)
    known, _ = parser.parse_known_args(of_training)
    for name in read_option_file(known.config) if known.config else ():
        option = f"--{name.replace('_', '-')}"
        if option in _OF_A_NODE:
            raise UsageError(f"--config {known.config}: {name}: the engine gives each node its own; leave it out")
        if name in _OF_A_COMMAND_LINE:
            raise UsageError(f"--config {known.config}: {name} cannot be set there for an engine; use {option} instead")


def _without_resume(options: list[str]) -> list[str]:
    """Leaves out --resume and its value, if it has one."""
    kept: list[str] = []
    is_value = False
    for word in options:
        if is_value and not word.startswith("--"):
            is_value = False
            continue
        is_value = word == "--resume"
        if not is_value and not word.startswith("--resume="):
            kept.append(word)
    return kept


@contextlib.contextmanager
def _naming_path() -> Iterator[None]:
    """Refuses a path that the system refuses."""
    try:
        yield
    except OSError as error:
        raise refused_path(error) from error


def _run(engine: Engine[Any]) -> int:
    output_dir = engine.job.output_dir
    with _naming_path():  # the name may be too long, or in a directory that may not be read
        is_new = not output_dir.exists()
    engine.check_here()
    with _naming_path():
        output_dir.mkdir(parents=True, exist_ok=True)
    if not os.access(output_dir, os.W_OK):
        raise UsageError(f"--output-dir {output_dir}: {output_dir} is not writable; choose another directory")
    try:
        with locked(output_dir):  # a second command would read how the nodes of the first have ended
            code = engine.run()
    except UsageError:
        with contextlib.suppress(OSError):  # something has been written there
            if is_new:
                output_dir.rmdir()
        raise
    found = sorted(output_dir.glob("node*/record.json"))
    for path in found:
        if (path.parent / "model.safetensors").exists():
            say(f"the model and the record are in {path.parent}")
    if code and not found and any(log.exists() for log in engine.job.logs):
        tell(f"the output of each node is in {engine.job.logs[0].parent}/node*.log")
    return code
