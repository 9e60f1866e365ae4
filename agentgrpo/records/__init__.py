"""What a run writes: metrics, rollouts, checkpoints, what trackers get."""
