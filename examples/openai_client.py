"""A client of a served model that calls Python: `python examples/openai_client.py "What is the sum of 34 and 70?"`.

It runs what the model writes on this machine, with your rights. For a model that you do not trust, use the sandbox.
"""

import json
import subprocess
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Run a Python program and return what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(4):
    reply = client.chat.completions.create(model=model, messages=messages, tools=[TOOL], temperature=0, max_tokens=64)
    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    print(json.dumps(messages[-1]))
    for call in messages[-1].get("tool_calls", []):
        code = json.loads(call["function"]["arguments"])["code"]
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=10)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout.rstrip("\n")})
        print(json.dumps(messages[-1]))
    if messages[-1]["role"] != "tool":
        break
