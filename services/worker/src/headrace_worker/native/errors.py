"""Why the compiled kernels are not used."""


class NativeUnavailable(Exception):
    """The kernels cannot be compiled or loaded here. Never fatal: torch's own operations do the same."""
