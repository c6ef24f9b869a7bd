"""Stands for the scheduler: lives until SIGTERM."""

import signal

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.sigwait([signal.SIGTERM])
