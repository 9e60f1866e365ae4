#!/bin/sh
awk '!seen[$0]++' /app/words.txt > /tmp/words && cp /tmp/words /app/words.txt
