"""What a rollout was worth."""
