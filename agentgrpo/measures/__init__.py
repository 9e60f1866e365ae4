"""What rollouts are measured by."""
