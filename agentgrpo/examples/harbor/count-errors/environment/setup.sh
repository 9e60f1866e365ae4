i=0
while [ $i -lt 200 ]; do
    i=$((i + 1))
    case $((i * i % 7)) in 0) level=ERROR;; 1) level=WARN;; *) level=INFO;; esac
    echo "2026-01-01T00:00:$((i % 60)) $level request $i, no ERROR in its body"
done > server.log
