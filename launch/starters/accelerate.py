"""accelerate launch (https://huggingface.co/docs/accelerate/package_reference/cli)."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from launch.nodes import own_address
from launch.starters.interface import Ranks, Starter, launcher_module
from launch.starters.torchrun import static_rendezvous

# So that no file in the user's home directory is read in its place.
_CONFIG = Path(__file__).with_name("accelerate_config.yaml")


class AccelerateLaunch(Starter):
    """``accelerate launch``, started as a Python module."""

    name = "accelerate"
    launcher = "accelerate launch"
    rank_variable = "RANK"
    variables = ("ACCELERATE_", "FSDP_")
    spans_nodes = True

    @override
    def command(self, ranks: Ranks) -> list[str]:
        # --multi_gpu also on CPUs: --cpu would start one process whatever --num_processes is, and ACCELERATE_USE_CPU
        # keeps the ranks off the GPUs.
        command = [*launcher_module(ranks, "accelerate.commands.launch"), f"--config_file={_CONFIG}"]
        if ranks.num_processes > 1:
            command += ["--multi_gpu"]
        command += [f"--num_processes={ranks.num_processes}", f"--num_machines={ranks.nodes.num_nodes}"]
        command += ["--mixed_precision=no", "--dynamo_backend=no", f"--log_dir={ranks.log_directory / 'torchrun'}"]
        if ranks.nodes.num_nodes > 1:
            command += [f"--machine_rank={ranks.nodes.node_rank}", f"--main_process_ip={ranks.nodes.master_addr}"]
            command += [f"--main_process_port={ranks.port}", "--rdzv_backend=static"]
            command += [f"--rdzv_conf={static_rendezvous(ranks)}"]
        else:
            command += [f"--main_process_port={ranks.master_port or 0}"]
        return [*command, "--module", *self.program(ranks)]

    @override
    def program(self, ranks: Ranks) -> list[str]:
        # Accelerate starts a single process itself, without torchrun and without a variable for its rank.
        return super().program(ranks) if ranks.num_processes > 1 else list(ranks.module)

    @override
    def environment(self, ranks: Ranks) -> dict[str, str]:
        variables = {}
        if ranks.nodes.num_nodes > 1:
            variables["PET_LOCAL_ADDR"] = own_address(ranks.nodes)  # --local-addr of the torchrun inside
        if ranks.device == "cpu":
            variables["ACCELERATE_USE_CPU"] = "true"
        return variables
