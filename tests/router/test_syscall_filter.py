"""What the processes of templates and grammars could do, were something to get out of hand: nothing but compute."""

import json
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_router.chat_template import ChatTemplate
from headrace_router.syscall_filter import MACHINES, Machine, program
from headrace_router.templates import new_spec
from headrace_shared.child_environment import child_environment

PREPARED = {
    "templates": """
from headrace_router import template_process
template_process.warm_up()
modules = set(sys.modules)
template_process.prepare()
""",
    "grammars, where another thread has shut all in": """
from headrace_router import grammar_process, helper_process
modules = set(sys.modules)
helper_process.confine(grammar_process.MAX_MEMORY_BYTES)
thread = threading.Thread(target=helper_process.shut_in)
thread.start()
thread.join()
""",
}
IMPORTS = "import ctypes, errno, json, mmap, os, socket, sys, threading, time; pair = socket.socketpair()"
ATTEMPTS = """
found = {}
libc = ctypes.CDLL(None, use_errno=True)

def attempt(name, call):
    try:
        call()
        found[name] = "done"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]
    except RuntimeError:
        found[name] = "EPERM"  # no thread

def raw(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")

attempt("read a file", lambda: open("/etc/passwd"))
attempt("read the parent's environment", lambda: open(f"/proc/{os.getppid()}/environ"))
attempt("list a folder", lambda: os.listdir("/"))
attempt("look for a file", lambda: os.stat("/etc/passwd"))
attempt("empty a file", lambda: os.truncate(MARK, 0))
attempt("delete a file", lambda: os.unlink(MARK))
attempt("rename a file", lambda: os.rename(MARK, MARK + "2"))
attempt("change a file's mode", lambda: os.chmod(MARK, 0o777))
attempt("make a link", lambda: os.symlink("/", MARK + "3"))
attempt("make a folder", lambda: os.mkdir(MARK + "4"))
attempt("connect", lambda: socket.socket())
attempt("connect locally", lambda: socket.socketpair())
attempt("send over a connection", lambda: pair[0].send(b"x"))
attempt("start a program", lambda: os.execv("/bin/true", ["true"]))
attempt("start a process", os.fork)
attempt("start a thread", lambda: threading.Thread(target=print).start())
attempt("kill the parent", lambda: os.kill(os.getppid(), 0))
attempt("change another's limit", lambda: raw({"x86_64": 302, "aarch64": 261}[MACHINE], os.getppid(), 7, 0, 0))
attempt("change a limit", lambda: raw({"x86_64": 302, "aarch64": 261}[MACHINE], 0, 7, 0, 0))
attempt("become somebody", lambda: os.setuid(0))
attempt("copy a descriptor", lambda: os.dup(0))
attempt("make a pipe", os.pipe)
attempt("trace", lambda: raw({"x86_64": 101, "aarch64": 117}[MACHINE], 0, 0, 0, 0))
attempt("read another's memory", lambda: raw({"x86_64": 310, "aarch64": 270}[MACHINE], os.getppid(), 0, 0, 0, 0, 0))
attempt("make a file in memory", lambda: raw({"x86_64": 319, "aarch64": 279}[MACHINE], b"x", 0))
attempt("make a ring", lambda: raw(425, 1, 0))
attempt("load a program into the kernel", lambda: raw({"x86_64": 321, "aarch64": 280}[MACHINE], 0, 0, 0))
attempt("another filter", lambda: raw({"x86_64": 317, "aarch64": 277}[MACHINE], 1, 0, 0))
attempt("the other set of calls", lambda: raw(0x40000000 + 39))
found["compute"] = sum(range(10**6))
found["take memory"] = len(mmap.mmap(-1, 1 << 24)) and len(bytearray(1 << 26))
found["tell the time"] = time.time() > 0 and time.localtime().tm_year > 2000
found["imported"] = sorted(set(sys.modules) - modules)
sys.stdout.write(json.dumps(found))
"""
FEATURES = [
    "{{ messages | tojson(indent=2, sort_keys=true) }}{{ 'ä' | upper | trim | length }}{{ 1.5 | round(1) | int }}",
    "{% for m in messages recursive %}{% if loop.first %}{% break %}{% endif %}{% endfor %}{{ 'a,b'.split(',') }}",
    "{% macro f(x, y=1) %}{{ caller() }}{% endmacro %}{% call f(1) %}{{ [3, 1] | sort | list }}{% endcall %}",
    "{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}{{ dict(a=1) | items | list }}{{ 'a' ~ 1 }}{{ 3 // 2 }}",
    "{{ 'lorem ipsum' | wordwrap(5) | center(20) | indent(2) | replace('l', 'L') }}{{ lipsum(1) | length > 0 }}",
    "{{ 'http://x.org' | urlize }}{{ {'a': 1} | xmlattr }}{{ '<b>' | striptags | escape }}{{ 5000 | filesizeformat }}",
    "{{ messages | map(attribute='role') | unique | list }}{{ messages | groupby('role') | list | length }}",
    "{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2] | slice(2) | list }}{{ 'a b' | wordcount }}{{ 1 | pprint }}",
    "{{ strftime_now('%d %B %Y, %H:%M:%S %Z %j %U') | length > 10 }}{{ range(5) | random < 5 }}{{ 'x' | urlencode }}",
    "{{ undefined.attribute }}",
    "{{ raise_exception('no') }}",
    "{{ ''.__class__ }}",
    "{{ 1 / 0 }}",
    "{{ '%d' | format('x') }}",
]


def run_confined(script: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=child_environment(), timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() not in MACHINES, reason="there is no filter for it")
@pytest.mark.parametrize("prepared", PREPARED.values(), ids=PREPARED)
def test_nothing_is_left_but_computing(prepared: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.write_text("here")
    given = f"MARK, MACHINE = {str(mark)!r}, {platform.machine()!r}\n"
    found = run_confined(given + IMPORTS + prepared + ATTEMPTS)
    assert isinstance(found, dict)
    assert (found.pop("compute"), found.pop("take memory")) == (499999500000, 1 << 26)
    assert found.pop("tell the time") is True and found.pop("imported") == []
    assert len(found) > 25 and set(found.values()) == {"EPERM"}, found
    assert mark.read_text() == "here" and list(tmp_path.iterdir()) == [mark]


def test_templates_find_all_they_use_when_nothing_can_be_opened_any_more() -> None:
    """They render as they do outside; what they would import then is not there."""
    script = (
        f"FEATURES = {FEATURES!r}\n"
        + """
import json, sys
from headrace_router import template_process
from headrace_router.templates import new_spec
template_process.prepare()
renderer = template_process.Renderer()
told = []
for source in FEATURES:
    spec = new_spec(source, ("<|x|>",), "", "")
    reply = renderer.answer("learn", *spec)
    told.append([reply[:1].decode(), json.loads(reply[1:]) if reply[:1] == b"T" else None])
sys.stdout.write(json.dumps(told))
"""
    )
    told = run_confined(script)
    assert isinstance(told, list) and len(told) == len(FEATURES)
    for source, (kind, probes) in zip(FEATURES, told, strict=True):
        expected = ChatTemplate(new_spec(source, ("<|x|>",), "", "")).probe()
        assert kind == "T" and [probe is None for probe in probes] == [probe is None for probe in expected], source
        if "random" not in source and "lipsum" not in source:
            assert probes == [None if probe is None else list(probe) for probe in expected], source


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_every_way_through_the_filter_ends_where_it_should(machine: Machine) -> None:
    """By running it, as the kernel does."""
    steps = list(struct.iter_unpack("=HBBI", program(machine)))

    def verdict(number: int, arch: int) -> int:
        at, value = 0, 0
        while True:
            code, if_true, if_false, operand = steps[at]
            at += 1
            if code == 0x20:
                value = {0: number, 4: arch}[operand]
            elif code == 0x06:
                return int(operand)
            else:
                assert code in (0x15, 0x35)
                at += if_true if (value == operand if code == 0x15 else value >= operand) else if_false

    allowed = {number for number in range(1000) if verdict(number, machine.audit_arch) == 0x7FFF0000}
    assert allowed == set(machine.calls) and len(allowed) == 32
    refused = {verdict(number, machine.audit_arch) for number in range(1000) if number not in allowed}
    assert refused == {0x00050001}
    assert verdict(0x40000000 | min(allowed), machine.audit_arch) == 0x00050001
    assert verdict(min(allowed), machine.audit_arch ^ 1) == 0x80000000, "another architecture's numbers"
