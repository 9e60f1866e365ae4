#!/bin/sh
# 1 if the state of the files is right.
reward=0
if [ "$(tr '\n' ' ' < /app/sorted.csv)" = "plum,100 apple,30 lemon,25 fig,9 pear,9 " ]
then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
