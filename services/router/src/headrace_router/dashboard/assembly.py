"""Connects the live page's parts to the router."""

from math import inf

from headrace_router.dashboard.collector import Collector
from headrace_router.dashboard.flooding import Flooding
from headrace_router.dashboard.inspector import Inspector
from headrace_router.dashboard.journal import Journal
from headrace_router.dashboard.live import Watchers
from headrace_router.dashboard.pages import Dashboard
from headrace_router.dashboard.stories import Stories
from headrace_router.models import Models
from headrace_shared.bus import Bus
from headrace_shared.messages import RouterId
from headrace_shared.patience import patiently
from headrace_shared.service import Service


def start_dashboard(service: Service, bus: Bus, models: Models, journal: Journal) -> Dashboard:
    """Its task belongs to the service."""
    collector = Collector(bus, lambda: [model.card.model for model in models.all()])
    stories = Stories(bus, RouterId(service.id), collector.schedulers_of)
    # The broker may go away at the very moment at which they begin to listen.
    service.spawn(patiently(collector.run, inf), "dashboard")
    service.spawn(patiently(stories.run, inf), "stories")
    watchers = Watchers(collector, service.draining)
    return Dashboard(service.id, collector, watchers, Inspector(journal, stories), Flooding(service.draining), models)
