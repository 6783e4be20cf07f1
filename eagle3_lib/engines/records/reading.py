"""Any file of another tool: the first module that recognises it reads it."""

from pathlib import Path
from typing import Protocol

from ...errors import Eagle3Error
from . import (
    aiperf,
    sglang_log,
    sglang_metrics,
    specdec_bench,
    specforge,
    speculators,
    vllm_answer,
    vllm_bench,
    vllm_log,
    vllm_metrics,
)
from .document import Document, open_document
from .recorded import Recorded, RecordedRequest


class Reader(Protocol):
    """One tool's module."""

    def recognise(self, document: Document) -> bool: ...

    def read(self, document: Document, of: str = "") -> Recorded: ...


# The first that recognises a file reads it. A bench result holds answers as text, so answers come last of the JSON.
READERS: tuple[Reader, ...] = (
    vllm_bench,
    aiperf,
    specdec_bench,
    specforge,
    vllm_answer,
    vllm_metrics,
    sglang_metrics,
    speculators,
    vllm_log,
    sglang_log,
)
KNOWN = (
    "vLLM's /metrics, log lines or answers, SGLang's log lines or /metrics, vllm bench serve, AIPerf, specdec_bench, speculators, "
    "SpecForge"
)


def read(path: str | Path, of: str = "") -> Recorded:
    """Acceptance from a file of another tool, recognised by its content.

    Args:
        of: which part, where a file has several: a model_name or model_id, a subset, a configuration of SpecForge.
    Raises:
        Eagle3Error: no such file, none of the known formats, cut off, or a value that cannot be; it names file and field.
    """
    document = open_document(path)
    for reader in READERS:
        if reader.recognise(document):
            return reader.read(document, of)
    if document.fault:
        raise Eagle3Error(f"{document.where}: not JSON (cut off?): {document.fault}")
    if any({"mode", "positions", "requests"} <= values.keys() for values in document.objects):
        raise Eagle3Error(
            f"{document.where}: found this project's benchmark.json, expected another tool's file; "
            f"eagle3 diagnose --benchmark reads it"
        )
    raise Eagle3Error(f"{document.where}: found none of the known formats, expected {KNOWN}")


def read_difference(before: str | Path, after: str | Path, of: str = "") -> Recorded:
    """What a vLLM server counted between two scrapes of its /metrics.

    Args:
        of: the model_name, where the server counted for several.
    Raises:
        Eagle3Error: a file is no such scrape, or the server was started again in between.
    """
    first, last = open_document(before), open_document(after)
    for document in (first, last):
        if not vllm_metrics.recognise(document):
            raise Eagle3Error(f"{document.where}: found no counters of vLLM, expected a scrape of its /metrics")
    return vllm_metrics.read_difference(first, last, of)


__all__ = ["Recorded", "RecordedRequest", "read", "read_difference"]
