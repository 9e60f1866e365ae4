mkdir -p data/a/b data/c
head -c 3000 /dev/zero > data/a/x
head -c 70000 /dev/zero > data/a/b/y
head -c 69999 /dev/zero > data/c/z
head -c 100 /dev/zero > data/.hidden
