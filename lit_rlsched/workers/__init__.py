"""Guarded processes in which code of users runs: it may crash, hang or take too much memory.

A pool (`pool.py`) starts processes and sends each the pickled code once. Calls are sent to free
workers, and answers come back as bytes. A worker that is late, dies or grows beyond its memory is
killed and replaced. The call to blame fails, and others that it had are made again; where it is not
clear which one is to blame, each of them runs alone.

Imports `settings`, `text`, `processes`.
"""
