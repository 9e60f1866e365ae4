"""Every setting of a run, with its default and its reason. config/read.py fills it from TOML."""

from agentgrpo.config.learning import (
    LORA_RANKS,
    LearnerConfig,
    LoraConfig,
    LossConfig,
    RewardConfig,
    room_for_adapters,
)
from agentgrpo.config.playing import (
    FILTERS,
    NO_REFERENCE,
    OWN_MODELS,
    AgentConfig,
    BranchConfig,
    DataConfig,
    EndpointConfig,
    EngineConfig,
    EnvConfig,
    EvaluationConfig,
    RolloutConfig,
    SandboxConfig,
    UserConfig,
)
from agentgrpo.config.run import (
    TrainConfig,
)
from agentgrpo.config.section import (
    NotNegative,
    Positive,
    Section,
)

__all__ = [
    "FILTERS",
    "LORA_RANKS",
    "NO_REFERENCE",
    "OWN_MODELS",
    "AgentConfig",
    "BranchConfig",
    "DataConfig",
    "EndpointConfig",
    "EngineConfig",
    "EnvConfig",
    "EvaluationConfig",
    "LearnerConfig",
    "LoraConfig",
    "LossConfig",
    "NotNegative",
    "Positive",
    "RewardConfig",
    "RolloutConfig",
    "SandboxConfig",
    "Section",
    "TrainConfig",
    "UserConfig",
    "room_for_adapters",
]
