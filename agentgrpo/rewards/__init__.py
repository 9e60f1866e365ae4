"""Reward functions and the code that scores rollouts with them."""
