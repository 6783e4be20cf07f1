"""Serving engines: how each is started and spoken to, what it tells, and how it is broken on purpose.

Engines run in subprocesses under their own interpreters; ``inside`` holds what runs there.
"""
