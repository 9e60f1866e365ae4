"""From a config to a trained policy: prepared, checked, planned, run."""
