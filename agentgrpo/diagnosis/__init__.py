"""Why a run does not learn, from its records alone: `agentgrpo doctor RUN`."""

from agentgrpo.diagnosis.checks import CHECKS, Finding
from agentgrpo.diagnosis.doctor import diagnose, report

__all__ = ["CHECKS", "Finding", "diagnose", "report"]
