"""The table of backends: where each adapter lives, what it supports, and whether it can run here.

Reading this table imports no library, so that a wrong request is refused before any work.
A backend of your own needs no row: name it as ``package.module:Class``.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec

from backends.apex_settings import ApexSettings
from backends.bucket_settings import BucketSettings
from backends.capabilities import (
    COMPRESSIONS,
    PRECISIONS,
    TORCH_SIGNS,
    BackendSettings,
    Capabilities,
    Signs,
    UnsupportedError,
)
from backends.ddp_settings import DDPSettings
from backends.deepspeed_settings import DeepSpeedSettings, deepspeed_capabilities, deepspeed_missing
from backends.devices import count_gpus
from backends.fsdp2_settings import FSDP2Settings
from backends.horovod_settings import HorovodSettings, horovod_capabilities, horovod_missing
from backends.interface import Backend, BackendOptions
from backends.packages import package_directory


def _nothing() -> str | None:
    return None


def _accelerate_missing() -> str | None:
    if package_directory("accelerate") is None:
        return "accelerate is not installed; run launch/run.sh accelerate, or pip install 'accelerate>=1.15,<2'"
    return None


def _apex_missing() -> str | None:
    source = "use NVIDIA's image nvcr.io/nvidia/pytorch:25.04-py3 or conda-forge's nvidia-apex 25.04"
    package = package_directory("apex")
    if package is None:
        return f"apex is not installed (PyPI's apex is another program); {source}"
    if not (package / "multi_tensor_apply").is_dir():
        return f"the installed apex is PyPI's Pyramid toolkit, not NVIDIA's; pip uninstall apex, then {source}"
    if not ((package / "amp").is_dir() and (package / "parallel").is_dir()):
        return f"this apex has no amp or parallel, which were removed after tag 25.04; {source}"
    if count_gpus() == 0:
        return "apex needs a CUDA GPU and none is visible; run it on a machine with one, or use ddp"
    return None


def _dp_missing() -> str | None:
    num_gpus = count_gpus()
    if num_gpus >= 2:
        return None
    visible = "1 GPU is" if num_gpus == 1 else "no GPU is"
    return f"it divides batches among the GPUs of one process, and {visible} visible; use single, or ddp for more ranks"


def _apex_remark() -> str | None:
    if find_spec("amp_C") is None:
        return "apex runs without its compiled kernels, correctly but slowly; build it with --cpp_ext --cuda_ext"
    return None


@dataclass(frozen=True)
class BackendRow:
    """What is known of one backend without importing its library.

    Attributes:
        adapter: Its class, as "module:Class".
        summary: What it is, in a few words.
        declare: Returns what it can do.
        unavailable_reason: Says in one line why it cannot run here and what to install, or None.
        remark: Says in one line what is worth knowing of it where it runs, or None.
        settings: Its own options.
        packages: The distributions whose versions a run record is to hold, besides torch's.
        signs: How its library shows that a rank waits for others, or has lost one.
        communicates_like: The backend whose collectives it uses, too; None where its library has its own.
        variables: Beginnings of the environment variables that change what its library does, for the run record.
        knobs: What may make it faster: for each knob its positions other than the default, each of options and
            variables as those of an entrant (compare/race/own_entrants.py).
    """

    adapter: str
    summary: str
    declare: Callable[[], Capabilities]
    unavailable_reason: Callable[[], str | None] = _nothing
    remark: Callable[[], str | None] = _nothing
    settings: type[BackendSettings] = BackendSettings
    packages: tuple[str, ...] = ()
    signs: Signs = TORCH_SIGNS
    communicates_like: str | None = None
    variables: tuple[str, ...] = ()
    knobs: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def capabilities(self) -> Capabilities:
        """What the backend supports; computed lazily, because it may require inspecting a library."""
        return self.declare()

    @property
    def has_own_collectives(self) -> bool:
        """Whether its ranks communicate through collectives of its own library."""
        return self.capabilities.max_world_size != 1 and self.communicates_like is None


def _single() -> Capabilities:
    return Capabilities(
        {"cpu": PRECISIONS, "cuda": PRECISIONS},
        start_methods=("python",),
        max_world_size=1,
        reasons={"grad_compression": "it sends none"},
    )


def _ddp() -> Capabilities:
    return Capabilities(
        {"cpu": PRECISIONS, "cuda": PRECISIONS},
        start_methods=("fork", "torchrun", "spawn"),
        ranks_may_share_gpu=True,
        compressions=COMPRESSIONS,
    )


def _dp() -> Capabilities:
    return Capabilities(
        {"cuda": PRECISIONS},
        start_methods=("python",),
        max_world_size=1,
        # A copy of a compiled module would call the compiled code of the module that it was made of.
        compiled_models=False,
        cuts_batches=True,
        sync_batchnorm=False,
        reasons={"num_processes": "which uses all GPUs", "grad_compression": "torch adds gradients up as they are"},
    )


def _fabric_missing() -> str | None:
    if package_directory("lightning_fabric") is None:
        return "lightning-fabric is not installed; run launch/run.sh fabric, or pip install 'lightning-fabric>=2.6,<3'"
    return None


def _fabric() -> Capabilities:
    return Capabilities(
        {"cpu": PRECISIONS, "cuda": PRECISIONS},
        start_methods=("fork", "torchrun", "spawn"),
        compressions=COMPRESSIONS,
    )


def _fsdp2_missing() -> str | None:
    version = metadata.version("torch")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 8):
        return f"fsdp2 needs torch 2.8 or newer, this is {version}; install a newer one, or use ddp"
    return None


def _fsdp2() -> Capabilities:
    return Capabilities(
        {"cpu": PRECISIONS, "cuda": PRECISIONS},
        start_methods=("fork", "torchrun", "spawn"),
        shards_weights=True,
        # It reduces the gradients that exist, which must be those of the same parameters on all ranks.
        unused_parameters=False,
        compiled_models=False,
        reasons={"grad_compression": "its reduce_dtype also adds micro-batches up in this format"},
    )


def _apex() -> Capabilities:
    return Capabilities(
        {"cuda": ("fp32", "fp16")},
        start_methods=("torchrun",),
        ranks_may_share_gpu=True,
        # After a reduction, its kernels copy gradients in float32 and below (csrc/multi_tensor_scale_kernel.cu).
        float64=False,
        # Apex reduces the gradients that exist, which must be those of the same parameters on all ranks.
        unused_parameters=False,
        # amp replaces functions of torch while the model runs, which a compiled graph would not see.
        compiled_models=False,
        sync_batchnorm=False,  # never tried: it needs a GPU
        reasons={
            "bf16": "its reduction silently leaves bfloat16 gradients out",
            "grad_compression": "its DistributedDataParallel has no such option",
        },
    )


def _accelerate() -> Capabilities:
    return Capabilities(
        {"cpu": ("fp32", "bf16"), "cuda": PRECISIONS},
        start_methods=("accelerate", "torchrun"),
        ranks_may_share_gpu=True,
        compressions=COMPRESSIONS,
        reasons={"fp16": "it would report fp16 and compute in fp32"},
    )


_BUCKETS = tuple(f"--bucket-cap-mb={mebibytes}" for mebibytes in (1, 5, 100))
_ROWS = ("--embedding-gradients=rows",)
# Over Open MPI, whose ranks poll while they wait: they look often, and give their cores away in between.
_YIELDING_MPI = "--start-method=mpirun HOROVOD_CYCLE_TIME=0.1 OMPI_MCA_mpi_yield_when_idle=1"

BACKENDS = {
    "single": BackendRow("backends.single:SingleBackend", "one process, the reference", _single),
    "dp": BackendRow("backends.dp:DPBackend", "torch DataParallel, several GPUs in one process", _dp, _dp_missing),
    "ddp": BackendRow(
        "backends.ddp:DDPBackend",
        "torch DistributedDataParallel",
        _ddp,
        settings=DDPSettings,
        knobs=(("--transport=shared-memory", *_ROWS), _BUCKETS),
        signs=Signs(
            (*TORCH_SIGNS.waiting, "backends/shared_memory.py"),
            (*TORCH_SIGNS.lost_peer, "Timed out waiting", "Broken pipe"),
        ),
    ),
    "fsdp2": BackendRow(
        "backends.fsdp2:FSDP2Backend",
        "torch fully_shard, sharded weights (ZeRO-3)",
        _fsdp2,
        _fsdp2_missing,
        settings=FSDP2Settings,
        knobs=(("--no-reshard-after-forward",),),
        communicates_like="ddp",
    ),
    "apex": BackendRow(
        "backends.apex:ApexBackend",
        "NVIDIA Apex: DistributedDataParallel and amp",
        _apex,
        _apex_missing,
        _apex_remark,
        ApexSettings,
        packages=("apex",),
        knobs=(("--delay-allreduce",),),
        signs=Signs((*TORCH_SIGNS.waiting, "apex/parallel"), TORCH_SIGNS.lost_peer),
        communicates_like="ddp",
    ),
    "horovod": BackendRow(
        "backends.horovod:HorovodBackend",
        "Horovod, ring all-reduce",
        horovod_capabilities,
        horovod_missing,
        settings=HorovodSettings,
        packages=("horovod",),
        # Milliseconds between two looks at what is to be reduced (1), and bytes that are reduced at once (128 MiB):
        # https://horovod.readthedocs.io/en/stable/tensor-fusion_include.html.
        knobs=(
            (*(f"HOROVOD_CYCLE_TIME={milliseconds}" for milliseconds in (0.1, 5, 20)), _YIELDING_MPI),
            tuple(f"HOROVOD_FUSION_THRESHOLD={mebibytes * 2**20}" for mebibytes in (1, 8)),
            ("--wait=sleep",),
        ),
        variables=("HOROVOD_", "OMPI_MCA_"),
        signs=Signs(
            ("horovod", "backends/horovod_waiting.py"),
            # The last two are of gloo, which it communicates through.
            ("Horovod has been shut down", "HorovodInternalError", "connectFullMesh failed", "remote process exited"),
        ),
    ),
    "accelerate": BackendRow(
        "backends.accelerate:AccelerateBackend",
        "Hugging Face Accelerate",
        _accelerate,
        _accelerate_missing,
        settings=BucketSettings,
        packages=("accelerate",),
        knobs=(_ROWS, _BUCKETS),
        variables=("ACCELERATE_",),
        signs=Signs((*TORCH_SIGNS.waiting, "accelerate"), TORCH_SIGNS.lost_peer),
        communicates_like="ddp",
    ),
    "fabric": BackendRow(
        "backends.fabric:FabricBackend",
        "Lightning Fabric, its DDP strategy",
        _fabric,
        _fabric_missing,
        settings=BucketSettings,
        packages=("lightning-fabric",),
        knobs=(_ROWS, _BUCKETS),
        communicates_like="ddp",
    ),
    "deepspeed": BackendRow(
        "backends.deepspeed:DeepSpeedBackend",
        "DeepSpeed, sharded optimizer state (ZeRO-1, ZeRO-2)",
        deepspeed_capabilities,
        deepspeed_missing,
        settings=DeepSpeedSettings,
        packages=("deepspeed",),
        knobs=(("--zero-stage=2",),),
        variables=("DS_",),
        signs=Signs((*TORCH_SIGNS.waiting, "deepspeed/comm"), TORCH_SIGNS.lost_peer),
        communicates_like="ddp",
    ),
}

# The backend that all others are compared with.
REFERENCE = "single"

# Ranks that do not communicate: no backend to train with, but what all others are measured against.
INDEPENDENT = "backends.independent:IndependentProcesses"


def find_backend(name: str) -> BackendRow:
    """Looks up a backend by its name in the table or as "module:Class".

    Raises:
        UnsupportedError: There is no such backend.
    """
    if name in BACKENDS:
        return BACKENDS[name]
    if ":" not in name:
        raise UnsupportedError(
            f"there is no backend {name!r}; choose {', '.join(BACKENDS)}, or name your own as package.module:Class"
        )
    adapter = load_backend(name)
    return BackendRow(
        name,
        adapter.__doc__ or name,
        lambda: adapter.capabilities,
        adapter.unavailable_reason,
        settings=adapter.Settings,
        signs=adapter.signs,
    )


def reference_backend(options: BackendOptions) -> Backend:
    """Constructs the reference, one process that communicates with nobody, with the options of any backend."""
    adapter = load_backend(REFERENCE)
    return adapter(replace(options, settings=adapter.Settings(), grad_compression="none"))


def load_backend(name: str) -> type[Backend]:
    """Imports the adapter class of a backend, and with it the library it adapts.

    Raises:
        UnsupportedError: A name of the form "module:Class" does not lead to an adapter.
    """
    path = BACKENDS[name].adapter if name in BACKENDS else name
    module_name, _, class_name = path.partition(":")
    try:
        # Warnings during an import are not errors, even if the user's own filters make them errors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapter = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # importing runs code that may do anything
        raise UnsupportedError(f"backend {name!r} cannot be imported ({error}); is it on PYTHONPATH?") from error
    if not (isinstance(adapter, type) and issubclass(adapter, Backend) and hasattr(adapter, "capabilities")):
        raise UnsupportedError(f"{name!r} is not a subclass of backends.interface.Backend that declares capabilities")
    capabilities = adapter.capabilities
    if not (isinstance(capabilities, Capabilities) and capabilities.precisions and capabilities.start_methods):
        raise UnsupportedError(f"{name!r} must declare Capabilities with at least one device and one start method")
    return adapter
