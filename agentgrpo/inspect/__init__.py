"""Reads what a run wrote: doctor, verify, view, push, audits of other programs."""
