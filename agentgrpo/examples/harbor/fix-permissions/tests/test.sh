#!/bin/sh
# 1 if the state of the files is right.
reward=0
if [ -z "$(find /app/site -type d ! -perm 755)" ] &&
    [ -z "$(find /app/site -type f ! -name '*.sh' ! -perm 644)" ] &&
    [ -z "$(find /app/site -name '*.sh' ! -perm 755)" ] &&
    [ "$(find /app/site -type f | wc -l)" = 3 ] &&
    [ "$(cat /app/site/index.html /app/site/img/logo /app/site/bin/run.sh | tr '\n' :)" = "page:picture:echo run:" ]
then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
