"""What a run leaves on disk and says."""
