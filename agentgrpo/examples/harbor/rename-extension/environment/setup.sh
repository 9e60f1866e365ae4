mkdir -p notes/old/2019 notes/new
echo one > notes/one.txt
echo two > notes/old/two.txt
echo three > 'notes/old/2019/number three.txt'
echo four > notes/new/four.csv
