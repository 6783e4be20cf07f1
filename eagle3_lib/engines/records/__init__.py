"""Acceptance as others wrote it down: files of other tools, read into this project's definitions.

Here belongs the reading of a file that another program wrote: a server's /metrics, log or saved answer, the result of a
benchmark. One module a tool, each with ``recognise(document)``, by content alone, and ``read(document, of)``; what a field
means in that tool, and in which version that was read, stands in its docstring. What this project measures itself is read by
:mod:`eagle3_lib.engines.measured`. The file of this folder to import is ``reading``. docs/records.md tells what each file gives.
"""
