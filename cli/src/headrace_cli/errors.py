"""What ends `headrace` with one line."""

from headrace_shared.errors import HeadraceError


class CommandError(HeadraceError):
    """`problem` says what is wrong, `fix` what to do about it."""

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(f"{problem}; {fix}" if fix else problem)
