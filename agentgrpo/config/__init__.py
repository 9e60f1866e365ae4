"""Every setting of a run with its default and description. config/read.py fills it from TOML."""

from agentgrpo.config.learning import LORA_RANKS as LORA_RANKS
from agentgrpo.config.learning import LearnerConfig as LearnerConfig
from agentgrpo.config.learning import LoraConfig as LoraConfig
from agentgrpo.config.learning import LossConfig as LossConfig
from agentgrpo.config.learning import RewardConfig as RewardConfig
from agentgrpo.config.learning import TeacherConfig as TeacherConfig
from agentgrpo.config.learning import room_for_adapters as room_for_adapters
from agentgrpo.config.playing import FILTERS as FILTERS
from agentgrpo.config.playing import NO_REFERENCE as NO_REFERENCE
from agentgrpo.config.playing import OWN_MODELS as OWN_MODELS
from agentgrpo.config.playing import AgentConfig as AgentConfig
from agentgrpo.config.playing import BranchConfig as BranchConfig
from agentgrpo.config.playing import DataConfig as DataConfig
from agentgrpo.config.playing import EndpointConfig as EndpointConfig
from agentgrpo.config.playing import EngineConfig as EngineConfig
from agentgrpo.config.playing import EnvConfig as EnvConfig
from agentgrpo.config.playing import EvaluationConfig as EvaluationConfig
from agentgrpo.config.playing import RolloutConfig as RolloutConfig
from agentgrpo.config.playing import SandboxConfig as SandboxConfig
from agentgrpo.config.playing import UserConfig as UserConfig
from agentgrpo.config.run import TrainConfig as TrainConfig
from agentgrpo.config.section import NotNegative as NotNegative
from agentgrpo.config.section import Positive as Positive
from agentgrpo.config.section import Section as Section
