"""What a run leaves on disk and says, and how it is stopped."""
