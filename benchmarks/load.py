"""The time from a fresh interpreter to a loaded model and tokenizer: ours against transformers, from one GGUF file.

Each load is a process of its own and counts its imports. Both end with bfloat16 parameters (the file is dequantised)
and a tokenizer. A ratio under 1 means that ours takes less time.
"""

import argparse
import subprocess
import sys
import time
from statistics import median

from benchmarks import record

REPEATS = 5
SIDES = ("ours", "theirs")


def load_ours() -> None:
    import hetsplit

    engine = hetsplit.load(record.smollm2(), device="cpu", dtype="bfloat16")
    assert engine.tokenizer is not None


def load_theirs() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = record.smollm2()
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )


def load_s(side: str) -> float:
    command = [sys.executable, "-m", "benchmarks.load", "--side", side]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"loading on the side {side!r} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def measure(deadline: float | None) -> tuple[dict[str, float], int]:
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    rounds, round_s = 0, 0.0
    while rounds < REPEATS and (rounds == 0 or deadline is None or time.monotonic() + round_s < deadline):
        started = time.monotonic()
        for side in SIDES:
            times[side].append(load_s(side))
        rounds, round_s = rounds + 1, time.monotonic() - started
    ours_s, theirs_s = (median(times[side]) for side in SIDES)
    return {"load_s_over_transformers": ours_s / theirs_s, "load_s": ours_s, "transformers_load_s": theirs_s}, rounds


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        {"ours": load_ours, "theirs": load_theirs}[options.side]()
        print(time.monotonic() - started)
        return
    figures, rounds = measure(started + record.QUICK_S if options.quick else None)
    record.write(options, "load", figures, rounds)


if __name__ == "__main__":
    main()
