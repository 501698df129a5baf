"""The table of tasks. A task of your own needs no row: name it as `package.module:Class`."""

from __future__ import annotations

import importlib

from tasks.interface import Task, TaskInputError

TASKS = {
    "text-classification": "tasks.text.classification:TextClassification",
    "token-tagging": "tasks.token_tagging:TokenTagging",
    "image-classification": "tasks.images.classification:ImageClassification",
    "paced": "tasks.paced:Paced",
}


def load_task(name: str) -> type[Task]:
    """Imports a task's class.

    Args:
        name: A name of the table, or `package.module:Class`.

    Returns:
        The class, a subclass of `tasks.interface.Task`.

    Raises:
        TaskInputError: There is no such task, or it cannot be imported, or is not complete.
    """
    path = TASKS.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise TaskInputError(
            f"there is no task {name!r}; choose {', '.join(TASKS)}, or name your own as package.module:Class"
        )
    try:
        task = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # importing runs code that may raise anything
        raise TaskInputError(f"task {name!r} cannot be imported ({error}); is it on PYTHONPATH?") from error
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise TaskInputError(f"task {name!r} is not a subclass of tasks.interface.Task")
    missing = [member for member in ("name", "Settings") if not hasattr(task, member)]
    missing += sorted(task.__abstractmethods__)
    if missing:
        raise TaskInputError(
            f"task {name!r} lacks {', '.join(missing)}; define them in the class, as tasks/interface.py describes"
        )
    return task
