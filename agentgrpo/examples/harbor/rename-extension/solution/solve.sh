#!/bin/sh
find /app/notes -name '*.txt' | while read -r file; do mv "$file" "${file%.txt}.md"; done
