#!/bin/sh
tail -n +2 /app/sales.tsv | awk -F'\t' '{ total[$2] += $3 } END { for (s in total) print s, total[s] }' | sort > /app/totals.txt
