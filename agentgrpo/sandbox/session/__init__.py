"""Sessions, the pool that starts them, and the results of their steps."""
