#!/bin/sh
LC_ALL=C sort -t, -k2,2nr -k1,1 /app/prices.csv > /app/sorted.csv
