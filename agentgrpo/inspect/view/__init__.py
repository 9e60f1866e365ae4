"""`agentgrpo view RUN`: a run as one self-contained HTML file."""
