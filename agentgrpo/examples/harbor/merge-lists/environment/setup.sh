printf '%s\n' ida bob eve ann bob > first.txt
printf '%s\n' eve dan bob eve cid > second.txt
