"""docs/benchmark_json.md names every field of benchmark.json, and its client reads chunks where a server has no flag."""

import http.server
import json
import re
import subprocess
import sys
import threading

import pytest

from eagle3_lib.engines import measured
from eagle3_lib.paths import ROOT
from eagle3_lib.results import Benchmark, MeasuredRequest

PAGE = (ROOT / "docs/benchmark_json.md").read_text()
STREAM = ROOT / "tests/data/records/vllm-server/on/chat_stream_long.txt"  # 46 steps, 9 accepted, 56 tokens


def rows(heading: str) -> dict[str, bool]:
    """field -> whether it is needed, from the table of a section."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = {}
    for names, needed in re.findall(r"^\| (`.*?) \| (yes|no) \|", section, re.MULTILINE):
        found |= {name: needed == "yes" for name in re.findall(r"`(\w+)`", names)}
    return found


@pytest.mark.parametrize("heading, kind", [("Of the file", Benchmark), ("Of a request", MeasuredRequest)])
def test_the_page_names_every_field(heading, kind):
    needed = rows(heading)
    assert needed.keys() == kind.__required_keys__ | kind.__optional_keys__
    assert {name for name, is_needed in needed.items() if is_needed} == kind.__required_keys__


class WithoutFlag(http.server.BaseHTTPRequestHandler):
    """Answers as the recorded vLLM did, without the record that its flag adds."""

    def do_GET(self):
        self._send("application/json", b'{"object": "list", "data": [{"id": "target", "object": "model"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send("text/event-stream", re.sub(r',"metrics":\{.*\}\}(?=\}\n)', "", STREAM.read_text()).encode())

    def _send(self, kind, body):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_the_client_reads_chunks_where_the_server_has_no_flag(tmp_path):
    (client,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "client.py").write_text(client)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "?"}))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), WithoutFlag)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    words = [f"http://127.0.0.1:{server.server_port}", "t", "4", str(tmp_path / "prompts.jsonl"), str(tmp_path)]
    try:
        subprocess.run([sys.executable, str(tmp_path / "client.py"), *words], check=True, timeout=60)
    finally:
        server.shutdown()
        server.server_close()
    bench = measured.read_rounds(tmp_path).bench
    (request,) = bench["requests"]
    assert bench["evidence"] == "chunks" and len(request["output_ids"]) == 56
    assert len(request["accepted"]) == 46 and sum(request["accepted"]) == 9 and request["drafted"] is None
