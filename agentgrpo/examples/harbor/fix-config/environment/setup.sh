cat > service.conf << 'END'
# The service.
host=localhost
port=80
debug=true
# port=1 was used before
timeout=30
END
