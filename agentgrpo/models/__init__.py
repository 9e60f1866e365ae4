"""Models as files and names: configs, chat templates, text to tokens."""
