printf '%s\n' b a b c a d b e c > words.txt
