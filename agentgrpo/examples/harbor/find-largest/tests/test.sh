#!/bin/sh
# 1 if the state of the files is right.
reward=0
if [ "$(cat /app/largest.txt)" = /app/data/a/b/y ]
then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
