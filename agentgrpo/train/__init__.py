"""Training: resolves and checks a config, builds the parts of a run, runs the loop."""
