"""What this machine is, has room for, and lacks."""
