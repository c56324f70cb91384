"""Everything that can be configured, as typed records. How they are read: common/settings.py.

A class of the system takes the record of its own concern, never the whole.
"""

from common.config.engine import (
    CacheConfig,
    CpuKernels,
    EngineConfig,
    LoraConfig,
    ModelBackend,
    Quantize,
    SchedulerConfig,
    SpeculationConfig,
    TiersConfig,
    check_adapter_name,
)
from common.config.front import FrontConfig, TlsConfig
from common.config.node import (
    DecodeConfig,
    NodeConfig,
    PrefillConfig,
    SharingConfig,
    TransferConfig,
)
from common.config.record import Positive, Record
from common.config.router import ClientsConfig, ImagesConfig, Priority, RouterConfig

__all__ = [
    "CacheConfig",
    "ClientsConfig",
    "CpuKernels",
    "DecodeConfig",
    "EngineConfig",
    "FrontConfig",
    "ImagesConfig",
    "LoraConfig",
    "ModelBackend",
    "NodeConfig",
    "Positive",
    "PrefillConfig",
    "Priority",
    "Quantize",
    "Record",
    "RouterConfig",
    "SchedulerConfig",
    "SharingConfig",
    "SpeculationConfig",
    "TiersConfig",
    "TlsConfig",
    "TransferConfig",
    "check_adapter_name",
]
