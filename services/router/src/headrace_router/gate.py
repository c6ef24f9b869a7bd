"""Whether a call may come in, and which model it gets, before anything is paid for it."""

from headrace_router.models import Models, ServedModel
from headrace_router.preparation import Parsed


class Gate:
    def __init__(self, models: Models) -> None:
        self._models = models

    def admit(self, parsed: Parsed) -> ServedModel:
        """Raises ModelNotFound or Overloaded."""
        return self._models.get(parsed.model)
