"""The tests mirror the package; `tiny` makes the models they use."""
