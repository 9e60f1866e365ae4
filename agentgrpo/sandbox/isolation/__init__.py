"""What holds a session: namespaces, limits, system call filter, root directories."""
