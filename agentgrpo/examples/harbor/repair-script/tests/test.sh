#!/bin/sh
# 1 if the state of the files is right.
reward=0
if [ "$(sh /app/greet.sh 'Ada  L.' Bob)" = "$(printf 'hello Ada  L.\nhello Bob')" ] &&
    [ -z "$(sh /app/greet.sh)" ]
then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
