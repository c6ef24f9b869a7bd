"""HTTP as bytes: what is malformed, and what comes back."""

import contextlib
import socket

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
GET = b"GET /live HTTP/1.1\r\nHost: x\r\n"


def exchange(port: int, *pieces: bytes) -> bytes:
    """Everything that comes until the server closes. TimeoutError: it does not within 5 s."""
    answer = b""
    with raw_connection(port) as connection:
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
    return answer


MALFORMED = {
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "equal lengths": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "a negative length": POST + b"Content-Length: -2\r\n\r\n{}",
    "a hexadecimal length": POST + b"Content-Length: 0x2\r\n\r\n{}",
    "a huge length": POST + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    "no length": POST + b"Content-Length: \r\n\r\n{}",
    "unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n",
    "identity coding": POST + b"Transfer-Encoding: identity\r\n\r\n",
    "two codings": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and more": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a blank before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a folded header": GET + b"X: a\r\n b\r\n\r\n",
    "a folded header with a tab": GET + b"X: a\r\n\tTransfer-Encoding: chunked\r\n\r\n",
    "a first line that is folded": b"GET /live HTTP/1.1\r\n Host: x\r\n\r\n",
    "no end of a chunk": CHUNKED + b"\r\n2\r\n{}XX0\r\n\r\n",
    "a bare line feed behind a chunk": CHUNKED + b"\r\n2\r\n{}\n0\r\n\r\n",
    "a bare line feed behind a size": CHUNKED + b"\r\n2\n{}\r\n0\r\n\r\n",
    "a negative size": CHUNKED + b"\r\n-2\r\n{}\r\n0\r\n\r\n",
    "a prefixed size": CHUNKED + b"\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "a huge size": CHUNKED + b"\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    "a line feed in an extension": CHUNKED + b"\r\n2;a\nb\r\n{}\r\n0\r\n\r\n",
    "a length in the trailer": CHUNKED + b"\r\n0\r\nContent-Length: 5\r\n\r\n",
    "bare line feeds": b"GET /live HTTP/1.1\nHost: x\n\n",
    "a bare carriage return": b"GET /live HTTP/1.1\r\nHost: x\rX: y\r\n\r\n",
    "a NUL": GET + b"X: a\0b\r\n\r\n",
    "no name": GET + b": b\r\n\r\n",
    "no colon": GET + b"foo\r\n\r\n",
    "a blank in the path": b"GET /li ve HTTP/1.1\r\nHost: x\r\n\r\n",
    "no ASCII in the path": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "no Host": b"GET /live HTTP/1.1\r\n\r\n",
    "two Hosts": GET + b"Host: y\r\n\r\n",
    "an empty Host": b"GET /live HTTP/1.1\r\nHost: \r\n\r\n",
    "a Host with a path": b"GET /live HTTP/1.1\r\nHost: x/y\r\n\r\n",
    "a Host with a user": b"GET /live HTTP/1.1\r\nHost: x@y\r\n\r\n",
    "a Host with a blank": b"GET /live HTTP/1.1\r\nHost: x y\r\n\r\n",
    "a broken address": b"GET /live HTTP/1.1\r\nHost: [::1\r\n\r\n",
    "a port that is none": b"GET /live HTTP/1.1\r\nHost: x:80a\r\n\r\n",
    "a whole URL": b"GET http://x/live HTTP/1.1\r\nHost: x\r\n\r\n",
    "another host's URL": b"GET http://evil/live HTTP/1.1\r\nHost: x\r\n\r\n",
    "a star": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tunnel": b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/1.2": b"GET /live HTTP/1.2\r\nHost: x\r\n\r\n",
    "a preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an unknown method": b"get /live HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00",
}


def raw_connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5.0)
