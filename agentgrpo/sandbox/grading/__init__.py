"""Runs hidden tests in a second session, so that the graded code cannot forge a verdict."""
