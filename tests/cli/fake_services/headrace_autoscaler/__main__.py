"""Stands for the autoscaler: lives until SIGTERM."""

import signal

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.sigwait([signal.SIGTERM])
