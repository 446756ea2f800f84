"""Imported only by the server of data workers: makes it and its workers ignore signals to the whole process group.

Slurm, for example, sends SIGTERM to all processes of a job, but the process that trains needs its workers until the
current batch is trained. The server ends after the last process that uses it.
"""

import signal

for _number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(_number, signal.SIG_IGN)
