"""The command that a starter runs instead of a launcher: asks the server for ranks, and waits for their end.

    python -S starter.py SOCKET START_METHOD NUM_PROCESSES MODULE ARGUMENTS

It imports next to nothing. When it is ended, the server sees the connection close and ends the ranks.
"""

import os
import sys
from pathlib import Path

from interpreter import asked


def main() -> int:
    path, start_method, num_processes, *module = sys.argv[1:]
    request = {
        "what": "ranks",
        "environment": dict(os.environ),
        "directory": str(Path.cwd()),
        "start_method": start_method,
        "num_processes": int(num_processes),
        "module": module,
    }
    with asked(path, request) as answers:
        words = answers.read().split()  # the number of the process, and its exit code
    return abs(int(words[1])) if len(words) > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
