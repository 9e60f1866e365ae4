"""Sessions, the pool that starts them, and what a step returns."""
