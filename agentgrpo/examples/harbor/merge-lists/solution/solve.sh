#!/bin/sh
sort -u /app/first.txt > /tmp/first
sort -u /app/second.txt | grep -Fxf /tmp/first > /app/both.txt
