"""Tests, in folders that mirror the package; tests/tiny.py makes their models."""
