"""Several models on machines that cannot hold all the workers they want: each that is asked for gets one. Pure."""

from collections.abc import Mapping
from typing import NamedTuple


class Share(NamedTuple):
    """What one model has and wants."""

    desired: int
    ready: int
    coming: int
    leaving: int
    is_full: bool
    """There was no room when it last wanted more."""

    @property
    def is_starved(self) -> bool:
        return self.is_full and self.desired > 0 and not self.ready + self.coming


def caps(shares: Mapping[str, Share]) -> dict[str, int]:
    """The most workers that a model may have now, where that is limited. While one model that is asked for has none for
    want of room, no other grows, and the largest gives one worker up, one at a time."""
    if not any(share.is_starved for share in shares.values()):
        return {}
    limited = {model: share.ready + share.coming for model, share in shares.items() if not share.is_starved}
    donors = [model for model in limited if shares[model].ready > 1]
    if donors and not any(share.leaving for share in shares.values()):
        donor = max(donors, key=lambda model: shares[model].ready)
        limited[donor] -= 1
    return limited
