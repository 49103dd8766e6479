"""The torch engine against transformers: one model, bfloat16, one process, in turn.

prefill  1,024 tokens; ours in chunks of 256, handing out blocks, theirs in one forward pass that computes one logit row
decode   32 greedy tokens after that prompt, one sequence; theirs with the cache it makes by default

Both are given the same parameters: the GGUF file is dequantised to bfloat16 on both sides. Each round times both sides,
decode in slices of a few tokens in turn, and changes who goes first; a ratio over 1 means that ours takes less time.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from threading import Event
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig, logging

import hetsplit
from benchmarks import record
from hetsplit.engines import Row

PROMPT, CHUNK, NEW, SLICE, ROUNDS = 1024, 256, 32, 4, 15


class Ours:
    def __init__(self) -> None:
        self.engine = hetsplit.load(record.smollm2(), device="cpu", dtype="bfloat16")

    def prefill(self, tokens: list[int]) -> list[Any]:
        return list(self.engine.prefill(tokens, range(0, PROMPT), chunk=CHUNK, stop=Event()))

    def decoder(self, blocks: list[Any]) -> Iterator[int]:
        """Send a token in, get the next greedy one."""
        store = self.engine.reserve(PROMPT + NEW)
        for block in blocks:
            store.write(block)
        cache, token = store.seal(PROMPT), None
        while True:
            token = yield token
            token = int(self.engine.step([Row(cache, [token])]).logits[0].argmax())


class Theirs:
    def __init__(self) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        path = record.smollm2()
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            quantization_config=GgufConfig(dequantize=True),
        ).eval()

    def prefill(self, tokens: list[int]) -> Any:
        with torch.inference_mode():
            return self.model(torch.tensor([tokens[:PROMPT]]), logits_to_keep=1).cache

    def decoder(self, cache: Any) -> Iterator[int]:
        token = None
        while True:
            token = yield token
            with torch.inference_mode():
                logits = self.model(torch.tensor([[token]]), cache=cache).logits
            token = int(logits[0, -1].argmax())


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def one_round(sides: tuple[Any, Any], tokens: list[int]) -> tuple[dict[Any, float], list[dict[Any, float]], int]:
    """Seconds of prefill, seconds per token of each slice of decode, and for how many tokens both agree."""
    prefill_s, decoders = {}, {}
    for side in sides:
        prefill_s[side], cache = timed(lambda side=side: side.prefill(tokens))
        decoders[side] = side.decoder(cache)
        next(decoders[side])
    found = {side: [tokens[PROMPT]] for side in sides}
    slices = []
    for _ in range(NEW // SLICE):
        slices.append({side: timed(lambda side=side: extend(decoders[side], found[side]))[0] / SLICE for side in sides})
    for decoder in decoders.values():
        decoder.close()
    one, other = found.values()
    return prefill_s, slices, next((i - 1 for i in range(NEW + 1) if one[i] != other[i]), NEW)


def extend(decoder: Iterator[int], tokens: list[int]) -> None:
    for _ in range(SLICE):
        tokens.append(decoder.send(tokens[-1]))  # type: ignore[attr-defined]


def measure(deadline: float | None) -> tuple[dict[str, float], int, dict[str, Any]]:
    """Ratios are medians over pairs that were measured side by side: a shared machine changes speed by the second."""
    ours, theirs = Ours(), Theirs()
    tokens = [(37 * i + 5) % 49_000 + 100 for i in range(PROMPT + 1)]
    one_round((ours, theirs), tokens)  # warm-up
    prefills, slices, round_s = [], [], 0.0
    while len(prefills) < ROUNDS and (not prefills or deadline is None or time.monotonic() + round_s < deadline):
        started = time.monotonic()
        order = (ours, theirs) if len(prefills) % 2 else (theirs, ours)
        prefill_s, decode_s, same = one_round(order, tokens)
        prefills.append(prefill_s)
        slices += decode_s
        round_s = time.monotonic() - started
    figures = {
        "prefill_over_transformers": median(t[theirs] / t[ours] for t in prefills),
        "decode_over_transformers": median(t[theirs] / t[ours] for t in slices),
        "prefill_tokens_per_s": PROMPT / median(t[ours] for t in prefills),
        "decode_tokens_per_s": 1 / median(t[ours] for t in slices),
        "transformers_prefill_tokens_per_s": PROMPT / median(t[theirs] for t in prefills),
        "transformers_decode_tokens_per_s": 1 / median(t[theirs] for t in slices),
    }
    notes = {
        "prompt": PROMPT,
        "chunk": CHUNK,
        "threads": torch.get_num_threads(),
        "equal_tokens_before_first_other": same,
    }
    return figures, len(prefills), notes


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    options = parser.parse_args()
    figures, rounds, notes = measure(started + record.QUICK_S if options.quick else None)
    record.write(options, "engines", figures, rounds, notes)


if __name__ == "__main__":
    main()
