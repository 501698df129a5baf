"""What node 0 does if the run that it is to resume has finished: it tells the other nodes.

Only node 0 has the record that says so. The others would wait for it to start (launch/meeting.py), and fail.
"""

from __future__ import annotations

from launch.errors import one_line, tell
from launch.meeting import MeetingFailed, dismiss
from launch.nodes import DEFAULT_PORT, settle_nodes
from launch.options import option_parser, read_option_file, validated
from records.config import RunOptions

_OF_NODES = ("num_nodes", "node_rank", "master_addr", "master_port", "timeout")


def tell_other_nodes(backend: str, arguments: list[str]) -> None:
    """Tells the other nodes that there is nothing to resume, if these are the options of node 0 of several.

    A dry run has nobody to tell, and nodes that may leave meet in torchrun's rendezvous.

    Args:
        backend: The backend.
        arguments: The options.

    Raises:
        UsageError: One of those about nodes cannot be used.
    """
    parser = option_parser(backend, {"": RunOptions})
    parser.add_argument("--dry-run", action="store_true", default=False)
    given = vars(parser.parse_known_args(arguments)[0])
    if "config" in given:
        given = {**read_option_file(given["config"]), **given}
    options: RunOptions = validated(RunOptions, {name: given[name] for name in _OF_NODES if name in given})
    is_one_of_several = options.num_nodes > 1 and options.master_addr is not None and "min_nodes" not in given
    if given["dry_run"] or options.node_rank or not is_one_of_several:
        return
    nodes = settle_nodes(options.num_nodes, options.node_rank, options.master_addr)
    tell(f"waits up to {options.timeout:g} s for the other nodes, to tell them")
    try:
        dismiss(nodes, options.master_port or DEFAULT_PORT, backend=backend, seconds=options.timeout)
    except MeetingFailed as error:  # whoever has not come does not need to know
        tell(one_line(error))
