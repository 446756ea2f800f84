"""Imported by the server of data workers alone: signals to a whole group of processes leave it and new workers alive.

Slurm, for example, sends SIGTERM to all processes of a job, but the process that trains needs its workers until the
batch under way is trained. The server ends when the last process that uses it has ended.
"""

import signal

for _number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(_number, signal.SIG_IGN)
