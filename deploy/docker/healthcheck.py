"""`healthcheck.py PORT` exits with 0 when GET /health on that port of this container answers 200.

Only `socket` is imported: this runs every few seconds in every container.
"""

import socket
import sys

with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=2.0) as connection:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    status_line = connection.recv(64).split()
sys.exit(status_line[1:2] != [b"200"])
