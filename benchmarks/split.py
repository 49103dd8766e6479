"""torch prefills, llama.cpp decodes: one request over loopback against each engine alone (SmolLM2, Q4_1).

A request is 1,024 prompt tokens and 128 new ones, greedy. The split runs in two worker processes, as the README starts
them. llama.cpp alone and transformers alone are those libraries as their users call them; torch alone is hetsplit in
one process, with bfloat16 weights to prefill and packed ones to decode. Each has a process of its own, since libraries
that compute in one slow each other down. All run in turn on the same cores, so a split gains only what each engine is
better at. A ratio over 1 means that the split takes less time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import hetsplit
from benchmarks import record

PROMPT, NEW, ROUNDS = 1024, 128, 7
ALONE = ("llamacpp", "transformers", "torch")

Run = Callable[[Sequence[int]], list[int]]
"""Prompt tokens to new ones."""


def through(split: "hetsplit.Split") -> Run:
    def run(tokens: Sequence[int]) -> list[int]:
        done = split.complete(list(tokens), temperature=0, max_tokens=NEW, ignore_eos=True)
        return [token.id for token in done.tokens]

    return run


def by_hand(side: Any) -> Run:
    def run(tokens: Sequence[int]) -> list[int]:
        decoder = side.decoder(side.prefill(tokens))
        next(decoder)
        found = [tokens[-1]]
        for _ in range(NEW):
            found.append(decoder.send(found[-1]))
        decoder.close()
        return found[1:]

    return run


def serve(name: str, pipe: Connection) -> None:
    """In a process of its own: answers prompts with new tokens, until the pipe ends."""
    from benchmarks.engines import Llama, Transformers

    if name == "torch":
        engine = hetsplit.load(record.smollm2(), device="cpu")
        run = through(hetsplit.connect(None, engine, mode="local"))
    else:
        run = by_hand(Llama(PROMPT + NEW) if name == "llamacpp" else Transformers())
    pipe.send(None)
    while (tokens := pipe.recv()) is not None:
        pipe.send(run(tokens))


@contextmanager
def alone(name: str) -> Iterator[Run]:
    """One engine that does the whole request."""
    context = get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(name, other), daemon=True)
    process.start()
    other.close()
    pipe.recv()

    def run(tokens: Sequence[int]) -> list[int]:
        pipe.send(tokens)
        found: list[int] = pipe.recv()
        return found

    try:
        yield run
    finally:
        process.terminate()
        process.join(10)


def measure(deadline: float | None) -> record.Measured:
    """Ratios are medians over the rounds: a shared machine changes speed by the second."""
    tokens = [(37 * i + 5) % 49_000 + 100 for i in range(PROMPT)]
    with ExitStack() as open_:
        prefill = open_.enter_context(record.worker("--role", "prefill"))
        decode = open_.enter_context(record.worker("--role", "decode", "--engine", "llamacpp"))
        runs = {"split": through(open_.enter_context(hetsplit.connect(prefill, decode, mode="split")))}
        runs |= {name: open_.enter_context(alone(name)) for name in ALONE}
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
    figures = {f"split_over_{name}": median(t[name] / t["split"] for t in rounds) for name in ALONE}
    figures["split_over_best_single"] = median(min(t[name] for name in ALONE) / t["split"] for t in rounds)
    figures |= {f"{name}_s": median(t[name] for t in rounds) for name in runs}
    same = sum(one == other for one, other in zip(texts["split"], texts["llamacpp"], strict=True))
    notes = {"prompt": PROMPT, "new_tokens": NEW, "tokens_equal_to_llamacpp_alone": same}
    return figures, len(rounds), notes


if __name__ == "__main__":
    record.main("split", __doc__, measure)
