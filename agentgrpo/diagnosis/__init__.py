"""Why a run does not learn, from its records alone: `agentgrpo doctor RUN`."""
