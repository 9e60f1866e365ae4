"""Where tasks and models come from."""
