"""torch prefills, llama.cpp decodes: one request over loopback against each engine alone (SmolLM2, Q4_1).

A request is 1,024 prompt tokens and 128 new ones, greedy. The split runs in two worker processes, as the README starts
them. llama.cpp alone and transformers alone are those libraries as their users call them; torch alone is hetsplit in
one process, with bfloat16 weights to prefill and packed ones to decode. All run in turn on the same cores, so a split
gains only what each engine is better at. A ratio over 1 means that the split takes less time.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch

import hetsplit
from benchmarks import record
from benchmarks.engines import Llama, Transformers

PROMPT, NEW, ROUNDS = 1024, 128, 7
READY_S = 120.0


@contextmanager
def worker(*options: str) -> Iterator[str]:
    """A worker process for the model; gives its address."""
    command = [sys.executable, "-m", "hetsplit", "worker", str(record.smollm2()), "--device", "cpu", *options]
    process = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("ready "))
        yield dict(part.partition("=")[::2] for part in line.split()[1:])["address"]
    finally:
        process.terminate()
        process.wait(READY_S)


def through(split: "hetsplit.Split") -> Callable[[Sequence[int]], list[int]]:
    def run(tokens: Sequence[int]) -> list[int]:
        done = split.complete(list(tokens), temperature=0, max_tokens=NEW, ignore_eos=True)
        return [token.id for token in done.tokens]

    return run


def alone(side: Any) -> Callable[[Sequence[int]], list[int]]:
    def run(tokens: Sequence[int]) -> list[int]:
        decoder = side.decoder(side.prefill(tokens))
        next(decoder)
        found = [tokens[-1]]
        for _ in range(NEW):
            found.append(decoder.send(found[-1]))
        decoder.close()
        return found[1:]

    return run


def measure(deadline: float | None) -> tuple[dict[str, float], int, dict[str, Any]]:
    """Ratios are medians over the rounds: a shared machine changes speed by the second."""
    tokens = [(37 * i + 5) % 49_000 + 100 for i in range(PROMPT)]
    with ExitStack() as open_:
        prefill = open_.enter_context(worker("--role", "prefill"))
        decode = open_.enter_context(worker("--role", "decode", "--engine", "llamacpp"))
        torch_alone = hetsplit.load(record.smollm2(), device="cpu")
        runs = {
            "split": through(open_.enter_context(hetsplit.connect(prefill, decode, mode="split"))),
            "llamacpp": alone(Llama(PROMPT + NEW)),
            "torch": through(open_.enter_context(hetsplit.connect(None, torch_alone, mode="local"))),
            "transformers": alone(Transformers()),
        }
        for run in runs.values():
            run(tokens[:32])  # warm-up
        rounds: list[dict[str, float]] = []
        texts: dict[str, list[int]] = {}
        round_s = 0.0
        while len(rounds) < ROUNDS and (not rounds or deadline is None or time.monotonic() + round_s < deadline):
            started = time.monotonic()
            names = list(runs)[len(rounds) % len(runs) :] + list(runs)[: len(rounds) % len(runs)]
            seconds = {}
            for name in names:
                begun = time.perf_counter()
                texts[name] = runs[name](tokens)
                seconds[name] = time.perf_counter() - begun
            rounds.append(seconds)
            round_s = time.monotonic() - started
    others = ("llamacpp", "transformers", "torch")
    figures = {f"split_over_{name}": median(t[name] / t["split"] for t in rounds) for name in others}
    figures["split_over_best_single"] = median(min(t[name] for name in others) / t["split"] for t in rounds)
    figures |= {f"{name}_s": median(t[name] for t in rounds) for name in runs}
    same = sum(one == other for one, other in zip(texts["split"], texts["llamacpp"], strict=True))
    notes = {
        "prompt": PROMPT,
        "new_tokens": NEW,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "tokens_equal_to_llamacpp_alone": same,
    }
    return figures, len(rounds), notes


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    options = parser.parse_args()
    figures, rounds, notes = measure(started + record.QUICK_S if options.quick else None)
    record.write(options, "split", figures, rounds, notes)


if __name__ == "__main__":
    main()
