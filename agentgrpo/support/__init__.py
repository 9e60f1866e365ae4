"""Helpers without a domain: files, user code, processes, hardware, packages."""
