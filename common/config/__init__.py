"""All configuration as typed records, which common/settings.py reads.

A component gets only the record for its own part.
"""

from common.config.engine import (
    CacheConfig,
    CpuKernels,
    EngineConfig,
    HiddenStatesConfig,
    InputEmbeddingsConfig,
    LoraConfig,
    ModelBackend,
    OffloadConfig,
    ParallelConfig,
    Quantize,
    RoutedExpertsConfig,
    SchedulerConfig,
    SpeculativeConfig,
    check_adapter_name,
    gpus_of,
)
from common.config.node import (
    NODE_CONFIGS,
    DecodeConfig,
    EncodeConfig,
    NodeConfig,
    PrefillConfig,
    PrefixSharingConfig,
    RankHostConfig,
    TransferConfig,
)
from common.config.record import ConfigRecord, Positive
from common.config.router import (
    MAX_MODELS,
    ClientsConfig,
    FingerprintChange,
    ImagesConfig,
    ModelConfig,
    Priority,
    RouterConfig,
)
from common.config.server import ServerConfig, TlsConfig
