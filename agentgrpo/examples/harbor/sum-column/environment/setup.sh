printf 'day\tshop\tamount\n' > sales.tsv
i=0
while [ $i -lt 60 ]; do
    i=$((i + 1))
    case $((i % 3)) in 0) shop=north;; 1) shop=south;; *) shop=east;; esac
    printf '%s\t%s\t%s\n' $i $shop $((i * 37 % 101)) >> sales.tsv
done
