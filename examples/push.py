"""This script holds the prefill engine and pushes to a decode worker. Usage: push.py MODEL DECODE_ADDRESS

Start the other side first, on the box with the memory bandwidth: hetsplit worker MODEL --role decode --listen ADDRESS
"""

import sys

import hetsplit

model, address = sys.argv[1:]
with hetsplit.connect(hetsplit.load(model), address) as split:
    answer = split.complete("The capital of France is", max_tokens=12, temperature=0.7, seed=1, stop="\n\n")
print(answer.text)
print(f"{answer.finish} after {len(answer.tokens)} tokens; {answer.timing}")
