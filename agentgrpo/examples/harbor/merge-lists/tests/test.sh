#!/bin/sh
# 1 if the state of the files is right.
reward=0
if [ "$(tr '\n' ' ' < /app/both.txt)" = "bob eve " ]
then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
