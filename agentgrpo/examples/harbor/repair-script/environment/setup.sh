cat > greet.sh << 'END'
#!/bin/sh
for name in $*; do
    echo helo $name
done
END
