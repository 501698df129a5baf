"""Asks an adapter for what it does not declare: ``python -m contract.refusals ADAPTER FILE [OPTIONS OF ITS OWN]``.

The constructor must refuse each request, in this one process. The answers are written to the file, a line of JSON for
each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from backends.capabilities import COMPRESSIONS, PRECISIONS, Capabilities, UnsupportedError
from backends.interface import BackendOptions
from backends.registry import load_backend
from launch.options import read_options


def undeclared(capabilities: Capabilities) -> list[dict[str, Any]]:
    """Returns options that the capabilities exclude, each with the value that the refusal must name."""
    known = {"precision": "fp32", "device": next(iter(capabilities.precisions))}
    requests: list[dict[str, Any]] = [{**known, "precision": "fp7", "names": "fp7"}]
    for device in ("cpu", "cuda", "abacus"):
        declared = capabilities.precisions.get(device)
        if declared is None:
            requests.append({**known, "device": device, "names": device})
            continue
        for precision in PRECISIONS:
            if precision not in declared:
                requests.append({"device": device, "precision": precision, "names": precision})
    if not capabilities.unused_parameters:
        requests.append({**known, "find_unused_parameters": True, "names": "unused"})
    requests += [
        {**known, "grad_compression": compression, "names": f"--grad-compression {compression}"}
        for compression in COMPRESSIONS
        if compression not in capabilities.compressions
    ]
    return requests


def main(adapter_name: str, path: Path, own: list[str]) -> None:
    """Makes the requests in turn, and ends at the first that is not refused, since a group may then exist."""
    adapter = load_backend(adapter_name)
    settings = read_options(adapter_name, adapter.Settings, own).backend_settings
    for request in undeclared(adapter.capabilities):
        options = {name: value for name, value in request.items() if name != "names"}
        answer: dict[str, Any] = {"asked": options, "names": request["names"]}
        try:
            adapter(BackendOptions(**options, settings=settings))
        except Exception as error:
            answer |= {"error": str(error), "type": type(error).__name__, "clear": isinstance(error, UnsupportedError)}
        else:
            answer |= {"error": None, "type": None, "clear": False}
        with path.open("a") as file:
            file.write(json.dumps(answer) + "\n")
        if not answer["clear"]:
            os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
