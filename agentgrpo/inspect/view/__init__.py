"""A run as one HTML file that needs no server and no network: `agentgrpo view RUN`."""
