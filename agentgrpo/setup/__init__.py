"""What comes before a run: its settings read, checked, planned, and its parts built."""
