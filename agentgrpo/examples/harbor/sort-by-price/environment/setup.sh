cat > prices.csv << 'END'
pear,9
apple,30
plum,100
fig,9
lemon,25
END
