"""Whether a number is in range, and how one that is not is shown. Pure."""

from headrace_shared.errors import InvalidRequest


def check_range(field: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    """NaN is in no range. Raises InvalidRequest."""
    if (low < value if above_low else low <= value) and value <= high:
        return
    lowest = f"above {low}" if above_low else f"at least {low}"
    raise InvalidRequest(f"'{field}' must be {lowest} and at most {high}, not {short(value)}.", param=field)


def short(value: float) -> str:
    """Clients may send numbers of any length."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return str(value)
