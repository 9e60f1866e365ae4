"""What a shell offers at the Tab key: commands, options, settings and their values, run folders."""
