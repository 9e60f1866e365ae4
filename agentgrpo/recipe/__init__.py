"""The recipe: data from a policy's own attempts, fine-tuning, RL in stages."""
