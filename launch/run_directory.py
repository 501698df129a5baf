"""The directory of a run: which one it is, whether it may be used, and which process has locked it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from launch.errors import UsageError
from launch.resume import Start, check_resumable, goes_on_in, latest_start
from records.checkpoint import checkpoint_path, checkpoint_step, list_checkpoints, remove_unfinished
from records.config import RunConfig, RunOptions
from records.files import write_atomically
from records.names import ATTEMPTS_NAME, CONFIG_NAME, LOGS_NAME, PROGRESS_NAME, RECORD_NAME, TRACES_NAME
from records.run_files import files_of_run, holds_run, linked_folders, names_in_the_way, remove_run
from records.tracker import TRACKERS
from tasks.interface import Task, TaskSettings


def default_output_dir(backend: str) -> Path:
    """Names a directory under runs/ that does not exist yet, and that no other process will create."""
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    safe = "".join(character if character.isalnum() else "-" for character in backend)
    candidates = (Path("runs") / f"{safe}-{stamp}{suffix}" for suffix in ["", *(f"-{n}" for n in range(2, 1000))])
    return next(path for path in candidates if not path.exists()).absolute()


def settle_output_dir(
    options: RunOptions, backend: str, task_class: type[Task], settings: TaskSettings, start: Start | None
) -> Path:
    """Returns the output directory of the run, as an absolute path.

    Raises:
        UsageError: It cannot be used; the text says why.
    """
    chosen = options.output_dir or default_output_dir(backend)
    directory = chosen.absolute()
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--output-dir {chosen}: this is a file; name a directory")
    if directory.exists() and any(directory.iterdir()):
        if not holds_run(directory):
            raise UsageError(f"--output-dir {chosen}: is not empty and holds no run; choose another directory")
        if goes_on_in(directory, options.resume, start) and not options.overwrite:
            check_resumable(directory)
        elif not options.overwrite:
            raise UsageError(
                f"--output-dir {chosen}: already holds a run; add --resume or --overwrite, or choose another directory"
            )
        else:
            refuse_links(str(chosen), directory)
            _check_inputs_survive(directory, settings, start)
        refuse_collisions(str(chosen), directory, task_class.model_files)
    parent = next(path for path in (directory, *directory.parents) if path.exists() or path.is_symlink())
    if not parent.exists():
        raise UsageError(
            f"--output-dir {chosen}: {parent} is a link to a path that does not exist; choose another directory"
        )
    if not parent.is_dir():
        raise UsageError(f"--output-dir {chosen}: {parent} is a file; choose another directory")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"--output-dir {chosen}: {parent} is not writable; choose another directory")
    return directory


def _check_inputs_survive(directory: Path, settings: TaskSettings, start: Start | None) -> None:
    """Refuses to replace a run if the new run reads some of its files. Files that no run wrote are kept."""
    removed = {path.resolve() for path in files_of_run(directory)}
    if start is not None and start.path.resolve() in removed:
        raise UsageError(
            f"--overwrite would remove the checkpoint {start.path} that --resume names; leave one of the options out"
        )
    for name, value in settings:
        if isinstance(value, (str, Path)):
            path = Path(value).resolve()
            is_inside = path.exists() and path.is_relative_to(directory.resolve())
            if is_inside and any(file.is_relative_to(path) for file in removed):
                raise UsageError(
                    f"--overwrite would remove --{name.replace('_', '-')} {value} with the run in {directory}; "
                    "choose another --output-dir"
                )


def refuse_collisions(config_name: str, directory: Path, patterns: tuple[str, ...]) -> None:
    """Refuses a directory with files that no run wrote and that a new run would overwrite.

    Args:
        config_name: The directory as the user named it.
        directory: The directory.
        patterns: What the files of the model will be called.

    Raises:
        UsageError: It names the first.
    """
    taken = names_in_the_way(directory, patterns)
    if taken:
        raise UsageError(
            f"--output-dir {config_name}: holds {taken[0]}, which no run wrote and this run would overwrite; "
            "move it away, or choose another directory"
        )


def refuse_links(config_name: str, directory: Path) -> None:
    """Refuses to replace a run one of whose folders is a link: the folder may belong to another run.

    Args:
        config_name: The directory as the user named it.
        directory: The directory.

    Raises:
        UsageError: It names the first link.
    """
    links = linked_folders(directory)
    if links:
        raise UsageError(
            f"--overwrite: {config_name}/{links[0]} is a link, and --overwrite does not follow links; remove the link, "
            "or choose another --output-dir"
        )


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Locks the directory of a run for this process; the system unlocks it when the process ends, in whatever way.

    Raises:
        UsageError: Another process has locked it.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _taken(output_dir) from error
        except OSError as error:  # not every network file system has locks
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EBADF):
                raise
        yield
    finally:
        os.close(descriptor)


def prepare_directory(config: RunConfig, start: Start | None) -> RunConfig:
    """Makes the directory of a run ready for its ranks; returns the configuration that the run uses.

    With --overwrite, the files of the previous run are removed. If a run is resumed in its own directory, what its
    earlier starts left is moved to attempts/. If it is resumed in a new directory, the checkpoint is copied.

    Raises:
        UsageError: Another run has used the directory since it was checked.
    """
    directory = config.output_dir
    if config.overwrite:
        remove_run(directory)
    if goes_on_in(directory, config.resume, start):
        _set_aside(config)
    elif any(directory.iterdir()) and not config.overwrite:
        raise _taken(directory)
    elif start is not None:
        config = config.model_copy(update={"resume_from": checkpoint_path(directory, start.state.step)})
    # This comes first, since it marks the directory as that of a run.
    write_atomically(directory / CONFIG_NAME, config.model_dump_json(indent=1))
    if start is not None and config.resume_from != start.path:
        _take_checkpoints(start, directory)
    (directory / LOGS_NAME).mkdir(exist_ok=True)
    return config


def restarted(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Makes the directory ready for a restart after a failure.

    Returns:
        The configuration of the restart, and the damaged checkpoints that were skipped.

    Raises:
        UsageError: All checkpoints are damaged.
    """
    start = latest_start(config.output_dir)
    update = {"resume_from": start.path if start else None, "num_restarts": config.num_restarts + 1}
    config = config.model_copy(update=update)
    _set_aside(config)
    write_atomically(config.output_dir / CONFIG_NAME, config.model_dump_json(indent=1))
    (config.output_dir / LOGS_NAME).mkdir()
    return config, start.damaged if start else ()


def _set_aside(config: RunConfig) -> None:
    """Moves what an earlier start of this run left, except the checkpoints to resume from, to attempts/."""
    directory = config.output_dir
    remove_unfinished(directory)
    left = [directory / name for name in (LOGS_NAME, TRACES_NAME, PROGRESS_NAME, RECORD_NAME, *TRACKERS)]
    # Checkpoints after the one to resume from belong to an abandoned continuation.
    begin = checkpoint_step(config.resume_from) if config.resume_from else 0
    left = [path for path in left if path.exists()]
    left += [path for path in list_checkpoints(directory) if checkpoint_step(path) > begin]
    if not left:
        return
    attempts = directory / ATTEMPTS_NAME
    attempt = attempts / str(
        1 + max((int(path.name) for path in attempts.glob("*") if path.name.isdecimal()), default=0)
    )
    attempt.mkdir(parents=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(directory / CONFIG_NAME, attempt / CONFIG_NAME)
    for path in left:
        path.replace(attempt / path.name)


def _take_checkpoints(start: Start, output_dir: Path) -> None:
    """Copies the checkpoint, and that of the best model, into a new run."""
    wanted = {start.state.step: start.path}
    if start.best_path is not None and start.best_path.exists():
        wanted[checkpoint_step(start.best_path)] = start.best_path
    for step, source in wanted.items():
        target = checkpoint_path(output_dir, step)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)


def _taken(output_dir: Path) -> UsageError:
    return UsageError(f"--output-dir {output_dir}: another run is using it; choose another directory")
