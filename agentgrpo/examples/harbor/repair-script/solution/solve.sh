#!/bin/sh
sed -i -e 's/\$\*/"$@"/' -e 's/helo \$name/"hello $name"/' /app/greet.sh
