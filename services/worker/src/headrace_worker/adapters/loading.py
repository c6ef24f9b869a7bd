"""Loads adapters in an engine process while it serves: files are read and checked in a thread of its own, and what came
of it is put in where the loop looks for news between two iterations."""

import logging
import queue
import threading
from typing import Any, NamedTuple

from headrace_worker.adapters.config import AdapterRefused
from headrace_worker.engine_frames import AdapterLoaded, LoadAdapter
from headrace_worker.iteration import AdapterSet

NOT_SERVED = "this worker serves no adapters: it was started without --lora and --lora-dir, or has several processes"

_log = logging.getLogger(__name__)


class AdapterRead(NamedTuple):
    """News for the loop."""

    wanted: LoadAdapter
    adapter: Any
    """As `AdapterSet.read` gives it; None: it could not be read."""
    problem: str


def start_reading(wanted: LoadAdapter, adapters: AdapterSet | None, inbox: "queue.Queue[Any]") -> None:
    """An `AdapterRead` will be in the inbox."""
    threading.Thread(target=_read, args=(wanted, adapters, inbox), name="adapter", daemon=True).start()


def put_in(read: AdapterRead, adapters: AdapterSet | None) -> AdapterLoaded:
    """Between two iterations."""
    if read.adapter is None or adapters is None:
        return AdapterLoaded(name=read.wanted.name, digest="", problem=read.problem, number=read.wanted.number)
    digest: str = read.adapter.digest
    problem = ""
    try:
        adapters.add(read.adapter)
    except AdapterRefused as refused:
        problem = str(refused)
    return AdapterLoaded(name=read.wanted.name, digest=digest, problem=problem, number=read.wanted.number)


def _read(wanted: LoadAdapter, adapters: AdapterSet | None, inbox: "queue.Queue[Any]") -> None:
    adapter, problem = None, NOT_SERVED
    if adapters is not None:
        try:
            adapter = adapters.read(wanted.folder)
            if wanted.digest and adapter.digest != wanted.digest:
                adapter, problem = None, "its files are not those that were loaded under this name"
        except AdapterRefused as refused:
            problem = str(refused)
        except Exception as error:  # whatever foreign files provoke in there must not end an engine that serves others
            _log.exception("adapter not readable")
            problem = f"it cannot be read: {type(error).__name__}"
    inbox.put(AdapterRead(wanted, adapter, problem))
