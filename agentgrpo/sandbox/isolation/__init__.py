"""Isolation of sessions: namespaces, limits, system call filter, root directories."""
