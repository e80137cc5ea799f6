"""Stream a completion from a server, with the standard library alone.

qcompile serve out/pycode &
python samples/client.py "def main("
"""

import json
import sys
from urllib.request import Request, urlopen

prompt = sys.argv[1] if len(sys.argv) > 1 else "def main("
body = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "stream": True}
asked = Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
with urlopen(asked) as response:
    for line in response:
        data = line.decode().removeprefix("data: ").strip()
        if data and data != "[DONE]":
            print(json.loads(data)["choices"][0]["text"], end="", flush=True)
print()
