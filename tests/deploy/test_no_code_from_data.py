"""No program of ours turns data into code: no format that can bear any is read, and nothing is evaluated."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "load": {"torch", "yaml", "np", "numpy"},
    "unsafe_load": {"yaml"},
    "full_load": {"yaml"},
    "system": {"os"},
    "popen": {"os"},
}
"""Attribute -> of which modules it is not called."""
OBJECTS = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"}
"""Of torch.distributed: they pickle."""
TRUST = {"trust_remote_code": True, "shell": True, "allow_pickle": True}


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[str]:
    called = node.func
    if isinstance(called, ast.Name) and called.id in BUILTINS | OBJECTS:
        yield called.id
    if isinstance(called, ast.Attribute):
        owner = called.value.id if isinstance(called.value, ast.Name) else ""
        if owner in METHODS.get(called.attr, ()) or called.attr in OBJECTS:
            yield f"{owner}.{called.attr}"
    for keyword in node.keywords:
        value = keyword.value
        if keyword.arg in TRUST and isinstance(value, ast.Constant) and value.value is TRUST[keyword.arg]:
            yield f"{keyword.arg}={value.value}"


def found_in(text: str) -> list[str]:
    return list(findings(ast.parse(text)))


def test_nothing_of_ours_reads_or_runs_code() -> None:
    parts = ("shared", "services", "cli", "simulator")
    files = [path for part in parts for path in (ROOT / part).rglob("src/**/*.py")]
    assert len(files) > 300
    found = {str(path.relative_to(ROOT)): names for path in files if (names := found_in(path.read_text()))}
    assert not found


HOSTILE = """
import pickle
from dill import x
eval('1')
torch.load(f)
yaml.load(f)
f(trust_remote_code=True)
dist.broadcast_object_list([])
subprocess.run('x', shell=True)
"""
HARMLESS = """
import json
re.compile('a')
np.frombuffer(b)
yaml.safe_load(f)
self.exec()
f(trust_remote_code=False)
"""


def test_the_search_finds_what_it_is_about() -> None:
    assert len(found_in(HOSTILE)) == 8
    assert not found_in(HARMLESS)
