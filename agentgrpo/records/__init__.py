"""A run's records: metrics, rollouts, checkpoints and trackers."""
