"""The learner: advantages, packing, the training step, weight sync."""
