#!/bin/sh
sed -i -e 's/^port=.*/port=8080/' -e '/^debug=/d' /app/service.conf
