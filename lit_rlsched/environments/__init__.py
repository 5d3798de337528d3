"""Tools and environments: what completions call, in processes that may crash.

A completion that calls tools has a session in a worker. It is opened before the completion begins.
When a turn ends, its calls are parsed (`chat.py`) and sent; the reply is appended, and the
completion goes on. At its end the environment may give a reward. A session that is lost is opened
again, and the same calls are made again.

Imports `settings`, `text`, `processes`, `workers`, `rewards`, `data`.
"""
