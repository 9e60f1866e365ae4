mkdir -p site/bin site/img
echo page > site/index.html
echo picture > site/img/logo
echo 'echo run' > site/bin/run.sh
chmod 600 site/index.html
chmod 777 site/img/logo
chmod 644 site/bin/run.sh
chmod 700 site/img
