"""`agentgrpo verify`, with independent re-implementations that it compares records with."""
