"""Fixtures of the tests in which things die."""

from tests.integration.conftest import client, deployment

__all__ = ["client", "deployment"]
