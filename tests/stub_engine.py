"""A server with vLLM's completion endpoint that fails on purpose after a number of answers; for tests of engines and stage 07.

    python tests/stub_engine.py PORT {hang,die,load} ANSWERS

hang: accepts the next completion and never answers, while /health stays at 200. die: ends at the next completion. load:
never becomes healthy. An answer echoes ten token ids, one a chunk.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, FAULT, ANSWERS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
answered = 0


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(503 if FAULT == "load" else 200)
        self.end_headers()

    def do_POST(self):
        global answered
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if answered >= ANSWERS:
            print(f"answer {answered + 1}: {FAULT}", flush=True)
            time.sleep(600) if FAULT == "hang" else os._exit(7)
        answered += 1
        self.send_response(200)
        if body.get("stream"):
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for token in range(10):
                self.wfile.write(f"data: {json.dumps(self.reply([token]))}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(self.reply(list(range(10)))).encode())

    def reply(self, token_ids):
        choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": token_ids}
        return {"id": "1", "object": "text_completion", "created": 0, "model": "target", "choices": [choice]}


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
