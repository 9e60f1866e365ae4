#!/bin/sh
find /app/site -type d -exec chmod 755 {} +
find /app/site -type f -exec chmod 644 {} +
find /app/site -name '*.sh' -exec chmod 755 {} +
