"""E2B's API on local sessions."""
