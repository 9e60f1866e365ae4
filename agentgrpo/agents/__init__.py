"""What the policy's text means, and how an observation is said to it."""
