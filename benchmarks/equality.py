"""Is the text of a split the text of one process? SmolLM2 in float32, greedy, 64 prompts of 1 to 1,500 tokens.

A prefill worker and a decode worker in processes of their own against an engine in this one, without any split; all
ids of all requests are compared, and the checked values of the model's reference prompt. Ends with exit code 1 on any
difference. `--quick` takes 6 prompts.
"""

import argparse
import sys
from contextlib import ExitStack
from pydoc_data.topics import topics

import hetsplit
from benchmarks import record

LONGEST, NEW = 1500, 64
FRANCE = [504, 3575, 282, 4649, 314]  # "The capital of France is"
FRANCE_IDS = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33]
"""Greedy continuation computed with transformers 5.24.0 in float32."""


def prompts(count: int, encode) -> list[list[int]]:
    """English text in `count` lengths spread evenly over 1 to `LONGEST`, each from another place."""
    ids = encode("\n".join(topics[name] for name in sorted(topics)))
    lengths = [1 + round(i * (LONGEST - 1) / (count - 1)) for i in range(count)]
    return [ids[i * 1000 : i * 1000 + length] for i, length in enumerate(lengths)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    options = parser.parse_args()
    engine = hetsplit.load(record.smollm2(), dtype="float32", device="cpu")
    todo = prompts(6 if options.quick else 64, engine.tokenizer.encode)
    equal = 0
    with ExitStack() as stack:
        prefill = stack.enter_context(record.worker("--dtype", "float32", "--role", "prefill"))
        decode = stack.enter_context(record.worker("--dtype", "float32", "--role", "decode"))
        split = stack.enter_context(hetsplit.connect(prefill, decode, mode="split"))
        single = stack.enter_context(hetsplit.connect(None, engine))
        france = split.complete(FRANCE, max_tokens=len(FRANCE_IDS)).ids
        print(
            f"checked values: {'equal' if france == FRANCE_IDS else f'got {france}, expected {FRANCE_IDS}'}",
            file=sys.stderr,
        )
        for prompt in todo:
            ours, one = (side.complete(prompt, max_tokens=NEW, ignore_eos=True) for side in (split, single))
            assert ours.timing.mode == "split" and one.timing.mode == "local"
            equal += ours.ids == one.ids
            print(
                f"{len(prompt):5} tokens: {'equal' if ours.ids == one.ids else f'{ours.ids} != {one.ids}'}", flush=True
            )
    figures = {"equal": equal, "prompts": len(todo), "checked_values_equal": float(france == FRANCE_IDS)}
    record.write(options, "equality", figures, 1)
    return 0 if equal == len(todo) and france == FRANCE_IDS else 1


if __name__ == "__main__":
    raise SystemExit(main())
