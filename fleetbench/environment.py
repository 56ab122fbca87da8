"""Environment: the variables that an experiment may set for its workers, and what each may hold.

The list is exact. A value is a number, a word or a list of names: none names a file, a plugin or a module, because an
experiment file loads nothing. A user who needs more sets it in the shell that starts the command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fleetbench.config import nearest
from fleetbench.errors import ConfigError

RECORDED = ("NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TORCH_NCCL_", "CUDA_DEVICE_", "PYTHONWARNINGS")
"""Prefixes of the variables that manifests record, from the experiment or from the shell."""

_WORDS = r"[A-Za-z0-9_^,:;.=+-]+"
_NUMBERS = """
NCCL_BUFFSIZE NCCL_COLLNET_ENABLE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_DMABUF_ENABLE NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER
NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_AR_THRESHOLD NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_QPS_PER_CONNECTION
NCCL_IB_RETRY_CNT NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_IGNORE_CPU_AFFINITY
NCCL_LL_THRESHOLD NCCL_LOCAL_REGISTER NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MAX_NRINGS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_MIN_NRINGS
NCCL_NET_GDR_READ NCCL_NET_SHARED_BUFFERS NCCL_NET_SHARED_COMMS NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVLS_ENABLE
NCCL_P2P_DIRECT_DISABLE NCCL_P2P_DISABLE NCCL_P2P_NET_CHUNKSIZE NCCL_P2P_NVL_CHUNKSIZE NCCL_P2P_USE_CUDA_MEMCPY NCCL_PXN_DISABLE
NCCL_SET_STACK_SIZE NCCL_SHM_DISABLE NCCL_SHM_USE_CUDA_MEMCPY NCCL_SOCKET_NTHREADS NCCL_TREE_THRESHOLD NCCL_WORK_FIFO_DEPTH
TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_CUDA_EVENT_CACHE
TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_ENABLE_TIMING
TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_NAN_CHECK TORCH_NCCL_TRACE_BUFFER_SIZE
TORCH_NCCL_USE_COMM_NONBLOCKING TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC
OMP_MAX_ACTIVE_LEVELS OMP_NUM_THREADS OMP_THREAD_LIMIT MKL_NUM_THREADS CUDA_DEVICE_MAX_CONNECTIONS
"""
_TUNED: Mapping[str, str] = {
    **dict.fromkeys(_NUMBERS.split(), r"-?\d{1,18}"),
    **dict.fromkeys(("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME"), _WORDS),
    **dict.fromkeys(("NCCL_ALGO", "NCCL_PROTO", "NCCL_DEBUG_SUBSYS", "OMP_PROC_BIND", "OMP_SCHEDULE"), _WORDS),
    **dict.fromkeys(("NCCL_NET_GDR_LEVEL", "NCCL_P2P_LEVEL", "NCCL_P2P_PXN_LEVEL"), "LOC|NVL|PIX|PXB|PXN|PHB|NODE|SYS|[0-9]"),
    **dict.fromkeys(("OMP_DYNAMIC", "MKL_DYNAMIC", "KMP_DUPLICATE_LIB_OK"), "(?i:true|false)|0|1"),
    **dict.fromkeys(("KMP_AFFINITY", "OMP_PLACES"), r"[A-Za-z0-9_,:=(){}\[\]-]+"),
    "NCCL_DEBUG": "VERSION|WARN|INFO|ABORT|TRACE",
    "NCCL_LAUNCH_MODE": "PARALLEL|GROUP",
    "NCCL_NET": "IB|Socket",
    "NCCL_SOCKET_FAMILY": "AF_INET6?",
    "GLOO_DEVICE_TRANSPORT": "TCP|UV|IBVERBS",
    "OMP_STACKSIZE": r"\d{1,9}[BKMG]?",
    "OMP_WAIT_POLICY": "(?i:active|passive)",
    "MKL_CBWR": "[A-Z0-9_,]+",
    "KMP_BLOCKTIME": r"\d{1,9}|infinite",
    "CUDA_DEVICE_ORDER": "FASTEST_FIRST|PCI_BUS_ID",
    "PYTHONWARNINGS": "default|error|always|module|once|ignore",
}
"""Names, and the pattern that a value matches."""


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for a variable that is not on the list, or a value that it may not have."""
    for name, value in environment.items():
        pattern = _TUNED.get(name)
        if pattern is None:
            hint = f"set it in the shell that starts the command; allowed: {' '.join(sorted(_TUNED))}{nearest(name, _TUNED)}"
            raise ConfigError("may not be set by an experiment", f"environment.{name}", repr(value), hint)
        if not re.fullmatch(pattern, value, re.ASCII):
            hint = f"a value is one of {pattern}, and names no file; or set it in the shell that starts the command"
            raise ConfigError("may not be set to this by an experiment", f"environment.{name}", repr(value), hint)
