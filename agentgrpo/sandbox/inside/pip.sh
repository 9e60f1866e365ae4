#!/bin/sh
exec /sandbox/venv/bin/python -m pip "$@"
