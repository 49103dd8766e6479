"""The torch engine against transformers and llama.cpp: one model (SmolLM2, Q4_1), one process, in turn.

prefill  1,024 tokens; ours in bfloat16, handing out blocks, in chunks of 512 and, beside, in one; transformers' in
         bfloat16, one forward pass that computes one logit row (sdpa); llama.cpp's own
decode   32 greedy tokens after that prompt, one sequence; ours from packed int4 weights, the file's own; transformers'
         from bfloat16, with the cache it makes by default; llama.cpp's from the file
batch 8  steps of 8 such sequences; llama.cpp's through our engine, which gives it one batch of 8

transformers is given the file's weights dequantised. Each round times all sides, decode in slices of a few tokens in
turn, and changes who goes first; a ratio over 1 means that ours takes less time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from threading import Event
from typing import Any

import llama_cpp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, GgufConfig, logging

import hetsplit
from benchmarks import record
from hetsplit.engines import Engine, Row
from hetsplit.split import CHUNK

PROMPT, NEW, SLICE, ROUNDS, BATCH = 1024, 32, 4, 15, 8


class Batched:
    """An engine of ours: one sequence, or `BATCH` equal ones."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def prefill(self, tokens: Sequence[int], chunk: int = CHUNK) -> list[Any]:
        span = range(0, len(tokens) - 1)
        return list(self.engine.prefill(tokens, span, chunk=chunk, stop=Event()))

    def decoder(self, blocks: list[Any], rows: int = 1) -> Iterator[int]:
        """Send a token in, get the next greedy one (of the last sequence)."""
        stores = [self.engine.reserve(PROMPT + NEW) for _ in range(rows)]
        for store in stores:
            for block in blocks:
                store.write(block)
            while not store.settle():
                pass
        caches, token = [store.seal(blocks[-1].stop) for store in stores], None
        try:
            while True:
                token = yield token
                token = int(self.engine.step([Row(cache, [token]) for cache in caches]).logits[-1].argmax())
        finally:
            for store in stores:
                store.release()


class Transformers:
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

    def prefill(self, tokens: Sequence[int]) -> Any:
        with torch.inference_mode():
            return self.model(torch.tensor([tokens[:-1]]), logits_to_keep=1).cache

    def decoder(self, cache: Any) -> Iterator[int]:
        token = None
        while True:
            token = yield token
            with torch.inference_mode():
                logits = self.model(torch.tensor([[token]]), cache=cache).logits
            token = int(logits[0, -1].argmax())


class Llama:
    """llama-cpp-python as its users call it."""

    def __init__(self, context: int = PROMPT + NEW) -> None:
        threads = torch.get_num_threads()
        self.model = llama_cpp.Llama(
            str(record.smollm2()), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def prefill(self, tokens: Sequence[int]) -> None:
        self.model.reset()
        self.model.eval(tokens[:-1])

    def decoder(self, _: None) -> Iterator[int]:
        token = None
        while True:
            token = yield token
            self.model.eval([token])
            logits = self.model._ctx.get_logits()
            token = int(np.ctypeslib.as_array(logits, (self.model.n_vocab(),)).argmax())


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def extend(decoder: Iterator[int], tokens: list[int]) -> None:
    for _ in range(SLICE):
        tokens.append(decoder.send(tokens[-1]))  # type: ignore[attr-defined]


class Sides:
    """All contestants: a name, who prefills it, and how many sequences its decode steps have."""

    def __init__(self) -> None:
        ours = Batched(hetsplit.load(record.smollm2(), device="cpu"))
        llama = Batched(hetsplit.load(record.smollm2(), engine="llamacpp", device="cpu"))
        self.plain: dict[str, Any] = {"ours": ours, "transformers": Transformers(), "llamacpp": Llama()}
        self.batched = {"ours_batch8": ours, "llamacpp_batch8": llama}

    def one_round(self, tokens: Sequence[int], turn: int) -> tuple[dict[str, float], list[dict[str, float]], int]:
        """Seconds of each prefill, seconds per step of each slice of decode, and for how many tokens ours is
        llama.cpp's."""
        names = list(self.plain)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        prefill_s, decoders = {}, {}
        for name in names:
            prefill_s[name], cache = timed(lambda name=name: self.plain[name].prefill(tokens))
            decoders[name] = self.plain[name].decoder(cache)
            if name == "ours":
                prefill_s["one_chunk"] = timed(lambda: self.batched["ours_batch8"].prefill(tokens, PROMPT))[0]
                for other, side in self.batched.items():
                    decoders[other] = side.decoder(cache, BATCH)
        found = {name: [tokens[-1]] for name in decoders}
        for decoder in decoders.values():
            next(decoder)
        slices = []
        for _ in range(NEW // SLICE):
            run = {name: timed(lambda name=name: extend(decoders[name], found[name]))[0] for name in decoders}
            slices.append({name: seconds / SLICE for name, seconds in run.items()})
        for decoder in decoders.values():
            decoder.close()  # type: ignore[attr-defined]
        pairs = zip(found["ours"], found["llamacpp"], strict=True)
        return prefill_s, slices, next((i - 1 for i, (one, other) in enumerate(pairs) if one != other), NEW)


def measure(deadline: float | None) -> record.Measured:
    """Ratios are medians over pairs that were measured side by side: a shared machine changes speed by the second."""
    sides = Sides()
    tokens = [(37 * i + 5) % 49_000 + 100 for i in range(PROMPT + 1)]
    sides.one_round(tokens[-256:], 0)  # warm-up
    prefills: list[dict[str, float]] = []
    slices: list[dict[str, float]] = []
    round_s = 0.0
    while len(prefills) < ROUNDS and (not prefills or deadline is None or time.monotonic() + round_s < deadline):
        started = time.monotonic()
        prefill_s, decode_s, same = sides.one_round(tokens, len(prefills))
        prefills.append(prefill_s)
        slices += decode_s
        round_s = time.monotonic() - started
    figures = {f"prefill_over_{name}": ratio(prefills, name, "ours") for name in ("llamacpp", "transformers")}
    figures["one_chunk_over_transformers"] = ratio(prefills, "transformers", "one_chunk")
    figures |= {f"decode_over_{name}": ratio(slices, name, "ours") for name in ("llamacpp", "transformers")}
    figures["batch8_over_llamacpp1"] = BATCH * ratio(slices, "llamacpp", "ours_batch8")
    figures["llamacpp_batch8_over_llamacpp1"] = BATCH * ratio(slices, "llamacpp", "llamacpp_batch8")
    figures["batch8_over_ours1"] = BATCH * ratio(slices, "ours", "ours_batch8")
    figures |= {f"{name}_prefill_tokens_per_s": PROMPT / median(t[name] for t in prefills) for name in sides.plain}
    figures |= {f"{name}_decode_tokens_per_s": 1 / median(t[name] for t in slices) for name in sides.plain}
    notes = {
        "prompt": PROMPT,
        "chunk": CHUNK,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "equal_tokens_before_first_other": same,
    }
    return figures, len(prefills), notes


def ratio(times: Sequence[dict[str, float]], name: str, over: str) -> float:
    return median(t[name] / t[over] for t in times)


if __name__ == "__main__":
    record.main("engines", __doc__, measure)
