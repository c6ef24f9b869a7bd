"""Where the processes of a running system listen, by the kernel's own account."""

import psutil

from tests.e2e.launcher import Launched


def listeners_of(system: Launched) -> dict[tuple[str, int], str]:
    """(address, port) -> name of the service; of all processes and their children."""
    found = {}
    for entry in system.ps():
        root = psutil.Process(int(entry["pid"]))
        # `up` is everybody's parent: its children are listed as what they are.
        family = [root] if entry["service"] == "up" else [root, *root.children(recursive=True)]
        for process in family:
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.ip, connection.laddr.port] = entry["service"]
                else:
                    # Datagrams that anybody may send.
                    assert connection.type.name != "SOCK_DGRAM" or connection.raddr, (entry, connection)
    return found
