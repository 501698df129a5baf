"""horovodrun without its look at how Horovod was built: ``python -m launch.starters.horovodrun_unchecked OPTIONS ...``.

Before horovodrun starts ranks, it imports torch in a process of its own, to ask Horovod whether it was built with
Gloo. That takes about as long as the start of a rank. It is not needed here, since each rank proves that it has met all
others: without Gloo, every one of them would be alone.
"""

from __future__ import annotations

from horovod.runner import launch

from launch.starters.loopback import confine_sockets


def main() -> None:
    """Runs horovodrun with the arguments of this process; it listens on the loopback interface only."""
    confine_sockets()
    launch.gloo_built = lambda verbose=False: True
    launch.run_commandline()


if __name__ == "__main__":
    main()
