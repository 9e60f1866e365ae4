#!/bin/sh
# 1 if the state of the files is right.
reward=0
if [ "$(find /app/notes -type f | sort | tr '\n' :)" = "$(cat /tests/names)" ] &&
    [ "$(cat '/app/notes/old/2019/number three.md')" = three ] &&
    [ "$(cat /app/notes/one.md /app/notes/old/two.md /app/notes/new/four.csv | tr -d '\n')" = onetwofour ]
then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
