"""Stands in for a judge's server, to try the example: python examples/judge/judge_server.py 8000."""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Says yes where the last number of the answer is the reference."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _, reference, answer = re.split(r"\n(?:Reference|Answer): ", body["messages"][-1]["content"])
        numbers = re.findall(r"-?\d+", answer.rpartition("\n")[0])
        said = "Yes." if numbers[-1:] == [reference] else "No."
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
