"""Five lines: two engines in one process, joined through real gRPC on loopback. Usage: quickstart.py MODEL"""

import sys

import hetsplit

with hetsplit.connect(hetsplit.load(sys.argv[1]), hetsplit.load(sys.argv[1])) as split:
    for token in split.chat([{"role": "user", "content": "What is gravity?"}]):
        print(token.text, end="", flush=True)
print()
