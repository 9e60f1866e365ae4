#!/bin/sh
grep -c '^[^ ]* ERROR ' /app/server.log > /app/errors.txt
