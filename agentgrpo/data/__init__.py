"""Tasks: streams, files, Hub datasets, generated word problems."""
