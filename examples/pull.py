"""This script holds the decode engine and pulls from a prefill worker. Usage: pull.py MODEL PREFILL_ADDRESS

Start the other side first, on the box with the compute: hetsplit worker MODEL --role prefill --listen ADDRESS
"""

import sys

import hetsplit

model, address = sys.argv[1:]
with hetsplit.connect(address, hetsplit.load(model)) as split:
    answer = split.generate("The capital of France is", max_tokens=12)
    for token in answer:
        print(token.text, end="", flush=True)
print(f"\n{answer.timing}")
