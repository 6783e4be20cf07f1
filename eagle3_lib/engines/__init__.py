"""Serving engines: each runs in a subprocess under its own interpreter and is spoken to over HTTP."""
