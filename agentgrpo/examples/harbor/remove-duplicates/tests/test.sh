#!/bin/sh
# 1 if the state of the files is right.
reward=0
if [ "$(tr -d '\n' < /app/words.txt)" = bacde ]
then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
