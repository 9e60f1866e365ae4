"""The recipe: data from the policy's rollouts (flywheel), fine-tuning, staged RL."""
