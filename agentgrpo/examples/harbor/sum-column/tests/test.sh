#!/bin/sh
# 1 if the state of the files is right.
reward=0
if cmp -s /app/totals.txt /tests/expected
then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
